"""Brier score, its decomposition and the reliability diagram of events "the value exceeds a threshold".

An ensemble of M members can forecast M + 1 probabilities k / M, where k members forecast the event. A single forecast
can only forecast the probabilities 0 and 1. The Brier score, its fair version and its decomposition need two
frequencies for each probability: the frequency with which the probability was forecast, and the frequency with which
it was forecast and the event occurred. The frequencies are stored for each case.

Shapes: N cases, L lead times, E events, R regions, M members, K = M + 1 probabilities, H x W = P cells.
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
    """Area means of the event scores for each case and lead time.

    Attributes:
        forecasts: (N, L, E, R, K) area fraction in which exactly k members exceed the threshold; the sum over K is 1.
        occurrences: (N, L, E, R, K) area fraction in which exactly k members and also the truth exceed the threshold.
        brier: (N, L, E, R) Brier score: area mean of the squared difference between k / M and the outcome (0 or 1).
        brier_fair: (N, L, E, R) fair Brier score, see `metrics_from_means`; NaN for one member.
        reference: (N, L, E, R) Brier score of the climatological probability.
    """

    forecasts: np.ndarray
    occurrences: np.ndarray
    brier: np.ndarray
    brier_fair: np.ndarray
    reference: np.ndarray

    @classmethod
    def empty(
        cls, initial_times: np.ndarray, num_leads: int, num_events: int, num_regions: int, num_members: int = 1
    ) -> Self:
        """Return new statistics of the cases with these initial times, (N,) in minutes; all values are NaN."""
        shape = len(initial_times), num_leads, num_events, num_regions
        return cls(
            np.asarray(initial_times, dtype=np.int64),
            forecasts=np.full((*shape, num_members + 1), np.nan),
            occurrences=np.full((*shape, num_members + 1), np.nan),
            brier=np.full(shape, np.nan),
            brier_fair=np.full(shape, np.nan),
            reference=np.full(shape, np.nan),
            num_members=num_members,
        )

    def add(
        self,
        index: tuple[int, int, int],
        area_mean: AreaMean,
        channel: int,
        members_MP: np.ndarray,
        truth_P: np.ndarray,
        threshold_P: np.ndarray,
        climatology_P: np.ndarray,
    ) -> None:
        """Add one event of one case at one lead time.

        Args:
            index: (index of the case, index of the lead time, index of the event).
            area_mean: area means over the regions.
            channel: index of the channel of the event in `area_mean`; the mask of this channel is used.
            members_MP: values of the members; masked cells may contain any value.
            truth_P: values of the truth; masked cells may contain any value.
            threshold_P: threshold in the units of the channel, (P,), or (1,) if it is the same in all cells. The event
                is a value above the threshold.
            climatology_P: climatological probability of the event, (P,) or (1,); it is the reference of the skill
                score. It should differ between cells with different climates. With a common probability, a forecast
                that only depends on the climate of the cell would have skill (Hamill and Juras 2006).

        Raises:
            DataError: if the number of members differs from other cases.
        """
        self.require_members(len(members_MP))
        # In each cell, the members that exceed the threshold are counted. Two area fractions are stored for each count:
        # of all cells with this count, and of the cells where the event also occurred.
        valid_P = area_mean.valid_CP[channel]
        occurred_P = valid_P & (truth_P > threshold_P)
        members_above_P = np.zeros(truth_P.shape, dtype=np.int32)
        for member_P in members_MP:
            members_above_P += member_P > threshold_P
        for k in range(self.num_members + 1):
            forecast_P = (members_above_P == k) & valid_P
            forecast_R, occurred_R = area_mean.means_of_channel(
                np.stack([forecast_P, forecast_P & occurred_P]), channel
            )
            # The values of all regions are written.
            self.forecasts[(*index, slice(None), k)] = forecast_R
            self.occurrences[(*index, slice(None), k)] = occurred_R
        # The Brier score is computed from these fractions: the error is k / M without the event and 1 - k / M with it.
        probability_K = self.probabilities
        forecast_RK = self.forecasts[index]
        occurred_RK = self.occurrences[index]
        squared_error_RK = (forecast_RK - occurred_RK) * probability_K**2 + occurred_RK * (1 - probability_K) ** 2
        self.brier[index] = squared_error_RK.sum(axis=-1)
        if self.num_members > 1:
            # Each member forecasts 0 or 1, so the variance over members is p (1 - p).
            variance_R = (forecast_RK * probability_K * (1 - probability_K)).sum(axis=-1)
            self.brier_fair[index] = self.brier[index] - variance_R / (self.num_members - 1)
        reference_error_P = np.where(valid_P, (climatology_P - occurred_P) ** 2, 0.0)
        self.reference[index] = area_mean.means_of_channel(reference_error_P[None], channel)[0]

    @property
    def probabilities(self) -> np.ndarray:
        """(K,) probabilities k / M that an ensemble of M members can forecast."""
        return np.arange(self.num_members + 1) / self.num_members

    def of_climatology(self) -> EventStatistics:
        """Return the statistics of the baseline that always forecasts the climatological probability.

        The baseline has no reliability diagram, so `forecasts` and `occurrences` are NaN. Its fair Brier score equals
        its Brier score, because the probability is not estimated from a small number of members.
        """
        arrays = {name: np.full_like(values, np.nan) for name, values in self.arrays().items()}
        arrays["brier"] = self.reference
        arrays["reference"] = self.reference
        if self.num_members > 1:
            arrays["brier_fair"] = self.reference
        return replace(self, **arrays)

    def diagram(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the reliability diagram over all cases.

        Returns:
            Two arrays (L, E, R, K). The first array is the frequency with which each of `probabilities` was forecast;
            its sum over K is 1. The second array is the observed frequency of the event where the probability was
            forecast, NaN for a probability that was never forecast.
        """
        forecast = self.forecasts.mean(axis=0)
        occurred = self.occurrences.mean(axis=0)
        with np.errstate(invalid="ignore"):
            return forecast, occurred / forecast

    def resampled(self) -> dict[str, np.ndarray]:
        """Return name -> (N, L, E, R) for the three Brier scores, which the bootstrap resamples."""
        return {name: getattr(self, name) for name in ("brier", "brier_fair", "reference")}

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric name -> (L, E, R): the metrics of `metrics_from_means` and the parts of the Brier score.

        Let p = k / M be a forecast probability, f(p) the observed frequency of the event where p was forecast, and b
        the base rate, which is the overall frequency of the event. Means are over cells and cases. ``reliability`` is
        the mean of (p - f(p))^2, ``resolution`` is the mean of (f(p) - b)^2, and ``uncertainty`` is b (1 - b).
        ``brier`` equals reliability - resolution + uncertainty exactly, because each p has a separate bin (Murphy 1973,
        J. Appl. Meteor. 12, 595-600).
        """
        forecast = self.forecasts.mean(axis=0)
        occurred = self.occurrences.mean(axis=0)
        # For every occurrence of the event, one of the probabilities was forecast, so the sum is the base rate.
        base_rate = occurred.sum(axis=-1)
        # With f(p) = occurred / forecast, forecast * (p - f(p))^2 equals (forecast * p - occurred)^2 / forecast. The
        # term of a probability that was never forecast is 0.
        with np.errstate(invalid="ignore", divide="ignore"):
            weight = np.where(forecast == 0, 0.0, 1.0 / forecast)
        return {
            **self.metrics_from_means(self.case_means()),
            "reliability": (weight * (forecast * self.probabilities - occurred) ** 2).sum(axis=-1),
            "resolution": (weight * (occurred - forecast * base_rate[..., None]) ** 2).sum(axis=-1),
            "uncertainty": base_rate * (1 - base_rate),
        }

    def metrics_from_means(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return metric name -> values, for the metrics that are functions of means over cases.

        - ``brier``: mean of (p - o)^2, where p is the forecast probability and o is the outcome (0 or 1).
        - ``brier_fair``: ``brier`` minus the mean of p (1 - p) / (M - 1), so that its expectation does not depend on M
          (Ferro 2014, doi:10.1002/qj.2270); NaN for one member.
        - ``brier_skill``, ``brier_skill_fair``: 1 - score / score of the climatological probability; NaN if the Brier
          score of this probability is 0, for example if the event occurs neither in the climate nor in the cases.

        Args:
            means: name of each statistic of `resampled` -> means over cases, of any shape.
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
        """Return the contribution of each case to the Brier scores; see `CaseStatistics.contributions`."""
        contributions = {}
        with np.errstate(invalid="ignore", divide="ignore"):
            reference = cases["reference"] / means["reference"]
            for score, skill in (("brier", "brier_skill"), ("brier_fair", "brier_skill_fair")):
                contributions[score] = cases[score]
                # The contribution is the derivative of score / reference, up to a factor that is equal for all cases.
                contributions[skill] = cases[score] / means[score] - reference
        return contributions
