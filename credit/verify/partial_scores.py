"""Share the cases between processes, and join the partial scores of the processes.

Each process scores its share of the cases (`WorkShare`) and stores the scores as `PartialScores`. `score_and_gather`
joins the partial scores of all processes on rank 0.

Shapes: N cases, F forecasts (without baselines), K total wavenumbers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from credit.parallel.object_collectives import gather_on_rank0, run_on_all_ranks
from credit.verify.scores.events import EventStatistics
from credit.verify.scores.rank_histogram import RankHistogram
from credit.verify.scores.seeps import SeepsStatistics
from credit.verify.statistics.case_statistics import CaseStatistics, DeterministicStatistics

Statistics = TypeVar("Statistics", bound=CaseStatistics)
Entry = TypeVar("Entry")
# (channel name, lead time in minutes) -> fields of the truth and of the forecasts
FieldsByChannelAndLead = dict[tuple[str, int], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class WorkShare:
    """Share of the cases that this process scores.

    Attributes:
        index: index of this share, from 0 to `num_shares` - 1.
        num_shares: number of shares into which the cases are divided.
        are_scores_used: False if the scores of this process are ignored, because another process makes the same
            forecasts.
        is_sharded: True if several ranks make each forecast together, because the weights, the fields or the members
            are distributed over these ranks. The ranks then communicate at every forecast step.
        has_whole_forecasts: False if this process only computes members or parts of the fields, sends them to another
            process and scores nothing.
    """

    index: int = 0
    num_shares: int = 1
    are_scores_used: bool = True
    is_sharded: bool = False
    has_whole_forecasts: bool = True


@dataclass(frozen=True)
class PartialScores:
    """Scores of some of the cases, and fields of the example case for figures.

    The maps, means and frames of the example are empty if the example is not one of these cases.

    Attributes:
        cases: (N,) initial times in minutes, increasing.
        statistics: forecast or baseline name -> error statistics of the forecast; `EnsembleStatistics` for ensembles.
        events: forecast or baseline name -> event statistics of the forecast. The climatology has no entry, because
            every entry also contains the Brier score of the climatological probability.
        seeps: forecast or baseline name -> SEEPS statistics of the forecast.
        histograms: ensemble name -> rank histograms of the ensemble.
        maps: maps of the example, see `credit.verify.scorer.Verification`.
        spectra: (figure channel, lead time in minutes) -> (N, 1 + F, K) power spectra: first of the truth, then of each
            forecast; NaN for a forecast without the channel.
        band_means: means of the example over a latitude band, see `credit.verify.example.ExampleEvolution`.
        zonal_means: zonal means of the example, see `credit.verify.example.ExampleEvolution`.
        animation_frames: fields of the example that animations show, see `credit.verify.example.ExampleEvolution`.
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
        """Return the scores of the cases of all parts, in the order of the initial times.

        Args:
            parts: partial scores of disjoint sets of cases; at least one part must have cases.

        Raises:
            DataError: if two parts have a case in common.
        """
        # Shares are interleaved in time, so their cases are sorted.
        cases = np.concatenate([part.cases for part in parts])
        order = np.argsort(cases)
        # Histograms are counts, so the histograms of the parts are added; other statistics are joined case by case.
        histograms = {}
        for name in parts[0].histograms:
            part_histograms = [part.histograms[name] for part in parts]
            histograms[name] = functools.reduce(operator.add, part_histograms)
        # The spectra of a part without cases have no keys, so only parts with cases are joined.
        parts_with_cases = [part for part in parts if len(part.cases)]
        spectra = {}
        for key in parts_with_cases[0].spectra:
            part_spectra = [part.spectra[key] for part in parts_with_cases]
            spectra[key] = np.concatenate(part_spectra)[order]
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

    def use_as_model(self, name: str, forecasts: Sequence[str]) -> PartialScores:
        """Return scores in which the forecast `name` is called ``model``.

        The forecasts before it in `forecasts` are left out. The fields of the example are also left out, because they
        show the forecasts of the run.

        Args:
            name: name of the forecast that becomes ``model``.
            forecasts: names of all forecasts without baselines, in the order of `spectra`.
        """
        position = list(forecasts).index(name)
        earlier = set(forecasts[:position])

        def rename(values: Mapping[str, Entry]) -> dict[str, Entry]:
            renamed = {}
            for key, value in values.items():
                if key not in earlier:
                    renamed["model" if key == name else key] = value
            return renamed

        # The second dimension of the spectra contains the truth, then the forecasts.
        spectra_index = [0, *range(1 + position, 1 + len(forecasts))]
        return PartialScores(
            cases=self.cases,
            statistics=rename(self.statistics),
            events=rename(self.events),
            seeps=rename(self.seeps),
            histograms=rename(self.histograms),
            spectra={key: power_NFK[:, spectra_index] for key, power_NFK in self.spectra.items()},
        )


def _join_statistics(parts: Sequence[PartialScores], attribute: str) -> dict[str, Statistics]:
    """Return forecast name -> statistics of the cases of all parts.

    Args:
        parts: partial scores of disjoint sets of cases.
        attribute: name of the attribute of `PartialScores` that contains the statistics.
    """
    joined = {}
    for name, statistics in getattr(parts[0], attribute).items():
        part_statistics = [getattr(part, attribute)[name] for part in parts]
        joined[name] = type(statistics).join(part_statistics)
    return joined


def _merge_fields(parts: Sequence[PartialScores], attribute: str) -> FieldsByChannelAndLead:
    """Return the fields of the example; only one of the parts contains them.

    Args:
        parts: partial scores of disjoint sets of cases.
        attribute: name of the attribute of `PartialScores` that contains the fields.
    """
    # The fields of all other parts are empty, so no entry is overwritten.
    merged = {}
    for part in parts:
        merged |= getattr(part, attribute)
    return merged


def score_and_gather(score_share: Callable[[], PartialScores | None], is_sharded: bool) -> PartialScores | None:
    """Collective: score the share of every rank; return the joined scores on rank 0 and None on the other ranks.

    Args:
        score_share: function that scores the share of this rank, and returns None if the scores of this rank are
            ignored.
        is_sharded: True if several ranks make each forecast together.

    Raises:
        CreditError: if scoring failed on any rank. All ranks raise the error. If several ranks make each forecast
            together, only the failed rank raises the error; the other ranks fail in their next forecast step.
    """
    if not dist.is_initialized():
        return score_share()
    results: list[PartialScores | None] = []
    if is_sharded:
        # The function calls collectives, and `run_on_all_ranks` does not support such functions.
        results.append(score_share())
    else:
        # This call only shares failures. The scores are large, and only rank 0 needs the scores of other ranks.
        run_on_all_ranks(lambda: results.append(score_share()))
    scores_by_rank = gather_on_rank0(results[0])
    if scores_by_rank is None:
        return None
    # Ranks whose scores are ignored sent None.
    return PartialScores.join([scores for scores in scores_by_rank if scores is not None])
