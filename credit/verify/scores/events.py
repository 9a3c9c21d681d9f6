"""EventSums: Brier score, its parts and the reliability diagram of threshold exceedances, kept case by case.

Shapes: N cases, L lead times, E events, R regions, M members, K = M + 1 probabilities, P cells.

An ensemble of M members has M + 1 possible probabilities k / M, a single forecast 0 and 1. So how often each was
forecast, and how often the event then happened, is all that the Brier score, its fair version and its decomposition
need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.case_statistics import CaseStatistics


@dataclass
class EventStatistics(CaseStatistics):
    """Area means of each case of the events "the value exceeds a threshold".

    Attributes:
        forecasts: (N, L, E, R, K) frequency of cells where k members exceed the threshold, adding up to 1.
        occurrences: (N, L, E, R, K) frequency of those among them where the truth does, too.
        brier: (N, L, E, R) squared difference of k / M and what happened (0 or 1).
        brier_fair: (N, L, E, R) the fair version; NaN of one member.
        reference: (N, L, E, R) squared error of the climatological probability.
    """

    forecasts: np.ndarray
    occurrences: np.ndarray
    brier: np.ndarray
    brier_fair: np.ndarray
    reference: np.ndarray

    @classmethod
    def empty(cls, initial: np.ndarray, leads: int, events: int, regions: int, members: int = 1) -> Self:
        """Return room for the cases that start at `initial`; NaN until they are added."""
        shape = len(initial), leads, events, regions
        counts = (np.full((*shape, members + 1), np.nan) for _ in range(2))
        scores = (np.full(shape, np.nan) for _ in range(3))
        return cls(np.asarray(initial, dtype=np.int64), *counts, *scores, members=members)

    def add(
        self,
        place: tuple[int, int, int],
        means: AreaMean,
        channel: int,
        members_MP: np.ndarray,
        truth_P: np.ndarray,
        threshold_P: np.ndarray,
        climatology_P: np.ndarray,
    ) -> None:
        """Enter one event of one case at one lead time.

        Args:
            place: numbers of the case, the lead time and the event.
            means: area means.
            channel: which of their channels the event is of; for its mask.
            members_MP: the members, whatever where masked.
            truth_P: the truth, likewise.
            threshold_P: in the channel's units, one for all cells (1,) or one for each; the event is a value above it.
            climatology_P: climatological probability of the event, likewise: what skill is measured against. One
                probability for cells whose climates differ makes skill of knowing the climate (Hamill and Juras 2006).

        Raises:
            DataError: if there are not as many members as the sums are for.
        """
        self._require_members(len(members_MP))
        valid = means.valid_CP[channel]
        happened = valid & (truth_P > threshold_P)
        count = np.zeros(truth_P.shape, dtype=np.int32)
        for member_P in members_MP:
            count += member_P > threshold_P
        for k in range(self.members + 1):
            forecast = (count == k) & valid
            both = means.means_of_channel(np.stack([forecast, forecast & happened]), channel)
            self.forecasts[(*place, slice(None), k)], self.occurrences[(*place, slice(None), k)] = both
        p, forecast, occurred = self.probabilities, self.forecasts[place], self.occurrences[place]
        self.brier[place] = ((forecast - occurred) * p**2 + occurred * (1 - p) ** 2).sum(axis=-1)
        if self.members > 1:
            self.brier_fair[place] = self.brier[place] - (forecast * p * (1 - p)).sum(axis=-1) / (self.members - 1)
        error = np.where(valid, (climatology_P - happened) ** 2, 0.0)
        self.reference[place] = means.means_of_channel(error[None], channel)[0]

    @property
    def probabilities(self) -> np.ndarray:
        """The probabilities k / M that can be forecast, (K,)."""
        return np.arange(self.members + 1) / self.members

    def of_climatology(self) -> EventStatistics:
        """Return the sums of the climatological probability as the forecast; it has no bins, hence no diagram.

        It is no share of a few members, so beside an ensemble its fair score is the other.
        """
        unknown = {name: np.full_like(own, np.nan) for name, own in self.planes().items()}
        known = ("brier", "reference") if self.members == 1 else ("brier", "brier_fair", "reference")
        return replace(self, **unknown | dict.fromkeys(known, self.reference))

    def diagram(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the reliability diagram over all cases.

        Returns:
            How often each of `probabilities` was forecast, (L, E, R, K), adding up to 1; how often the event then
            happened, (L, E, R, K), NaN for a probability never forecast.
        """
        forecast, occurred = self.forecasts.mean(axis=0), self.occurrences.mean(axis=0)
        with np.errstate(invalid="ignore"):
            return forecast, occurred / forecast

    def resampled(self) -> dict[str, np.ndarray]:
        """See `CaseStatistics.resampled`: without the frequencies of single probabilities."""
        return {name: getattr(self, name) for name in ("brier", "brier_fair", "reference")}

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric -> (L, E, R): those of `metrics_of`, and the parts of the Brier score.

        With p = k / M, o the truth (0 or 1) and means over cells and cases: ``reliability`` is the mean of (p -
        observed frequency given p)^2; ``resolution`` that of (that frequency - the base rate)^2; ``uncertainty`` is
        base rate (1 - base rate). ``brier`` = reliability - resolution + uncertainty exactly, as each p has its own bin
        (Murphy 1973, J. Appl. Meteor. 12, 595-600).
        """
        p, forecast, occurred = self.probabilities, self.forecasts.mean(axis=0), self.occurrences.mean(axis=0)
        base = occurred.sum(axis=-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            weight = np.where(forecast == 0, 0.0, 1.0 / forecast)
        return {
            **self.metrics_of({name: own.mean(axis=0) for name, own in self.resampled().items()}),
            "reliability": (weight * (forecast * p - occurred) ** 2).sum(axis=-1),
            "resolution": (weight * (occurred - forecast * base[..., None]) ** 2).sum(axis=-1),
            "uncertainty": base * (1 - base),
        }

    def metrics_of(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what is a function of means over cases.

        - ``brier``: mean of (p - o)^2.
        - ``brier_fair``: less the mean of p (1 - p) / (M - 1), so that its expectation does not depend on M (Ferro
          2014, doi:10.1002/qj.2270); NaN of one member.
        - ``brier_skill``, ``brier_skill_fair``: 1 - score / score of the climatological probability; NaN where that is
          never wrong, as of an event that neither the climate nor the cases have.
        """
        reference = np.where(means["reference"] > 0, means["reference"], np.nan)
        return {
            "brier": means["brier"],
            "brier_fair": means["brier_fair"],
            "brier_skill": 1 - means["brier"] / reference,
            "brier_skill_fair": 1 - means["brier_fair"] / reference,
        }

    def contributions(
        self, cases: Mapping[str, np.ndarray], means: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """See `CaseStatistics.contributions`."""
        found = {}
        with np.errstate(invalid="ignore", divide="ignore"):
            reference = cases["reference"] / means["reference"]
            for name, skill in (("brier", "brier_skill"), ("brier_fair", "brier_skill_fair")):
                found |= {name: cases[name], skill: cases[name] / means[name] - reference}
        return found
