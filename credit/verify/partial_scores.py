"""Which cases a process scores, and what several of them found, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from credit.parallel.object_collectives import together
from credit.verify.scores.events import EventStatistics
from credit.verify.scores.rank_histogram import RankHistogram
from credit.verify.scores.seeps import SeepsSums
from credit.verify.statistics.case_statistics import CaseStatistics
from credit.verify.statistics.deterministic import DeterministicStatistics

Sums = TypeVar("Sums", bound=CaseStatistics)
# (channel, lead time in minutes) -> of the truth, of the forecast, ...
Pairs = dict[tuple[str, int], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class WorkShare:
    """Which of the cases are scored by this process.

    Attributes:
        number: of this process among those that share the cases.
        count: how many share them.
        counts: False for one that makes the same forecasts as another, whose scores count.
        is_spread: whether the forecasts are made by several ranks together, which meet at every step.
    """

    number: int = 0
    count: int = 1
    counts: bool = True
    is_spread: bool = False


@dataclass(frozen=True)
class PartialScores:
    """What the scoring of some cases found.

    Attributes:
        cases: (N,) initial times, increasing.
        sums: of every forecast and baseline.
        events: of every forecast and baseline but the climatology, whose probability is in all of them.
        seeps: of every forecast and baseline.
        histograms: of those that are ensembles.
        maps: of the example, if it is among the cases.
        strips, zonal, frames: of the example's course.
        spectra: (figure channel, lead) -> (N, 1 + F, K) power of the truth and of every forecast, NaN of
            one that lacks the channel.
    """

    cases: np.ndarray
    sums: dict[str, DeterministicStatistics]
    events: dict[str, EventStatistics]
    seeps: dict[str, SeepsSums]
    histograms: dict[str, RankHistogram]
    maps: Pairs
    spectra: dict[tuple[str, int], np.ndarray]
    strips: Pairs = field(default_factory=dict)
    zonal: Pairs = field(default_factory=dict)
    frames: Pairs = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Sequence[PartialScores]) -> PartialScores:
        """Return what all parts found."""
        cases = np.concatenate([part.cases for part in parts])
        order = np.argsort(cases)
        some = [part for part in parts if len(part.cases)]
        return cls(
            cases[order],
            _join([part.sums for part in parts]),
            _join([part.events for part in parts]),
            _join([part.seeps for part in parts]),
            {key: reduce(add, [part.histograms[key] for part in parts]) for key in parts[0].histograms},
            _merge(part.maps for part in parts),
            {key: np.concatenate([part.spectra[key] for part in some])[order] for key in some[0].spectra},
            strips=_merge(part.strips for part in parts),
            zonal=_merge(part.zonal for part in parts),
            frames=_merge(part.frames for part in parts),
        )


def _join(parts: Sequence[dict[str, Sums]]) -> dict[str, Sums]:
    return {key: type(own).join([part[key] for part in parts]) for key, own in parts[0].items()}


def _merge(parts: Iterable[Pairs]) -> Pairs:
    return {key: fields for part in parts for key, fields in part.items()}


def gather(score: Callable[[], PartialScores | None], is_spread: bool) -> PartialScores | None:
    """Return what `score` finds on all ranks, put together, on the first of them and None on the others; collective.

    Raises:
        CreditError: on every rank, if scoring failed on any; where forecasts are spread over ranks on that one alone,
            whose end the others see in the network, as they wait for it there.
    """
    if not dist.is_initialized():
        return score()
    found: list[PartialScores | None] = []
    if is_spread:
        found.append(score())
    else:
        together(lambda: found.append(score()))
    parts: list[PartialScores | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(found[0], parts)
    return None if parts is None else PartialScores.join([own for own in parts if own is not None])
