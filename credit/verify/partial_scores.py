"""Partial scores of a subset of cases, the share of cases of a process, and the joining of all of them.

Shapes: N cases, F forecasts, K total wavenumbers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from credit.parallel.object_collectives import run_on_all_ranks
from credit.verify.scores.events import EventStatistics
from credit.verify.scores.rank_histogram import RankHistogram
from credit.verify.scores.seeps import SeepsStatistics
from credit.verify.statistics.case_statistics import CaseStatistics, DeterministicStatistics

Statistics = TypeVar("Statistics", bound=CaseStatistics)
# (channel, lead time in minutes) -> fields of the truth, of the forecast, ...
FieldsByChannelAndLead = dict[tuple[str, int], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class WorkShare:
    """Share of the cases that this process scores.

    Attributes:
        index: index of the share among all shares of the cases, from 0.
        num_shares: number of shares.
        is_counted: False for a process that makes the same forecasts as another one, whose scores count.
        is_sharded: True if several ranks share the weights or the members of each forecast and meet at every step.
        has_all_members: False for a process that sends the members which it computes to another one and scores nothing.
    """

    index: int = 0
    num_shares: int = 1
    is_counted: bool = True
    is_sharded: bool = False
    has_all_members: bool = True


@dataclass(frozen=True)
class PartialScores:
    """Scores of some of the cases.

    Attributes:
        cases: (N,) initial times in minutes, increasing.
        statistics: name of every forecast and baseline -> its deterministic and ensemble statistics.
        events: name of a forecast or baseline -> statistics of events. The climatology has none, because the statistics
            of all others contain its probabilities.
        seeps: name of every forecast and baseline -> statistics of SEEPS.
        histograms: name of every ensemble -> its rank histograms.
        maps: maps of the example, see `credit.verify.scorer.Verification`; empty if the example is not among the cases.
        spectra: (figure channel, lead) -> (N, 1 + F, K) power of the truth and of every forecast, NaN of a forecast
            that lacks the channel.
        band_means: band means of the example's evolution, see `credit.verify.example`.
        zonal_means: zonal means of the example's evolution.
        animation_frames: fields of the example's animation.
    """

    cases: np.ndarray
    statistics: dict[str, DeterministicStatistics]
    events: dict[str, EventStatistics]
    seeps: dict[str, SeepsStatistics]
    histograms: dict[str, RankHistogram]
    maps: FieldsByChannelAndLead = field(default_factory=dict)
    spectra: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    band_means: FieldsByChannelAndLead = field(default_factory=dict)
    zonal_means: FieldsByChannelAndLead = field(default_factory=dict)
    animation_frames: FieldsByChannelAndLead = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Sequence[PartialScores]) -> PartialScores:
        """Return the scores of the cases of all parts, in the order of the cases.

        Raises:
            DataError: if two parts have a case in common.
        """
        cases = np.concatenate([part.cases for part in parts])
        order = np.argsort(cases)
        # Histograms are counts over all cases, which are added; other statistics are joined case by case.
        histograms = {}
        for name in parts[0].histograms:
            part_histograms = [part.histograms[name] for part in parts]
            histograms[name] = functools.reduce(operator.add, part_histograms)
        # A process without cases has not seen which channels and lead times have spectra.
        parts_with_cases = [part for part in parts if len(part.cases)]
        spectra = {}
        for key in parts_with_cases[0].spectra:
            spectra[key] = np.concatenate([part.spectra[key] for part in parts_with_cases])[order]
        return cls(
            cases=cases[order],
            statistics=_join_statistics(parts, "statistics"),
            events=_join_statistics(parts, "events"),
            seeps=_join_statistics(parts, "seeps"),
            histograms=histograms,
            maps=_merge_fields(parts, "maps"),
            spectra=spectra,
            band_means=_merge_fields(parts, "band_means"),
            zonal_means=_merge_fields(parts, "zonal_means"),
            animation_frames=_merge_fields(parts, "animation_frames"),
        )


def _join_statistics(parts: Sequence[PartialScores], attribute: str) -> dict[str, Statistics]:
    """Return name -> statistics of the cases of all parts, for one of the attributes of `PartialScores`."""
    joined = {}
    for name, statistics in getattr(parts[0], attribute).items():
        part_statistics = [getattr(part, attribute)[name] for part in parts]
        joined[name] = type(statistics).join(part_statistics)
    return joined


def _merge_fields(parts: Sequence[PartialScores], attribute: str) -> FieldsByChannelAndLead:
    """Return the fields of all parts, for one of the attributes; only the part with the example has any."""
    merged = {}
    for part in parts:
        merged |= getattr(part, attribute)
    return merged


def gather_scores(score_share: Callable[[], PartialScores | None], is_sharded: bool) -> PartialScores | None:
    """Collective: run `score_share` on all ranks and return the joined scores on rank 0, None on the others.

    Args:
        score_share: function that scores the share of this rank, and returns None if the share is not counted.
        is_sharded: True if several ranks make each forecast together.

    Raises:
        CreditError: on every rank, if scoring failed on any. With sharded forecasts only the failing rank raises it.
            The other ranks fail in the collectives of the next step.
    """
    if not dist.is_initialized():
        return score_share()
    results: list[PartialScores | None] = []
    if is_sharded:
        results.append(score_share())
    else:
        # Only a failure is shared here. The scores are large, and rank 0 alone needs those of the others.
        run_on_all_ranks(lambda: results.append(score_share()))
    parts: list[PartialScores | None] | None = None
    if dist.get_rank() == 0:
        parts = [None] * dist.get_world_size()
    dist.gather_object(results[0], parts)
    if parts is None:
        return None
    return PartialScores.join([part for part in parts if part is not None])
