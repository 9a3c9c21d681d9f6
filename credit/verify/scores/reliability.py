"""Points of reliability diagrams, kept for each case so that their confidence intervals can be computed.

A point shows the observed frequency of an event where one probability, or one of a few neighbouring probabilities, was
forecast.

Shapes: N cases, L lead times, E events, R regions, K = M + 1 probabilities of M members, B points of a diagram.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from credit.verify.scores.events import EventStatistics
from credit.verify.significance.bootstrap import confidence_intervals
from credit.verify.statistics.case_statistics import CaseStatistics

# Neighbouring probabilities of large ensembles share a point.
MAX_POINTS = 11
# Names of the results: mean forecast probability, how often it was forecast, and observed frequency of the event.
OBSERVED_FREQUENCY = "diagram_observed"
POINT_NAMES = ("diagram_probability", "diagram_frequency", OBSERVED_FREQUENCY)


@dataclass
class ReliabilityStatistics(CaseStatistics):
    """Area means of the points of all events for each case and lead time, each (N, L, E B, R) float64.

    In the third dimension the B points of the first event come first, then those of the second event, and so on.

    Attributes:
        frequency: area fraction of the region in which a probability of the point was forecast; the fractions of the
            points of an event add up to 1.
        probability: area mean of the forecast probability, counted as 0 where no probability of the point was forecast.
        occurrence: area fraction of the region in which a probability of the point was forecast and the event happened.
    """

    frequency: np.ndarray
    probability: np.ndarray
    occurrence: np.ndarray

    @classmethod
    def build(cls, events: EventStatistics) -> Self:
        """Return the points of all events.

        Each forecast probability has its own point. With more than 11 probabilities, neighbouring ones are pooled into
        11 points.
        """
        num_probabilities = events.num_members + 1
        num_points = min(num_probabilities, MAX_POINTS)
        # Index of the first probability of each point; the points have equal numbers of probabilities, up to one.
        edges = np.arange(num_points) * num_probabilities // num_points

        def pool(values_NLERK: np.ndarray) -> np.ndarray:
            # Sum over the probabilities that share a point; events and their points become one dimension.
            pooled_NLERB = np.add.reduceat(values_NLERK, edges, axis=-1)
            pooled_NLEBR = np.moveaxis(pooled_NLERB, -1, 3)
            return pooled_NLEBR.reshape(*pooled_NLEBR.shape[:2], -1, pooled_NLEBR.shape[-1])

        return cls(
            events.initial_times,
            frequency=pool(events.forecasts),
            probability=pool(events.forecasts * events.probabilities),
            occurrence=pool(events.occurrences),
            num_members=events.num_members,
        )

    def metrics_from_means(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return mean forecast probability, its frequency and the observed frequency of each point.

        Args:
            means: name of each attribute -> its means over cases, of any shape.

        Returns:
            Each of `POINT_NAMES` -> values of this shape. Forecast probability and observed frequency are NaN for a
            point of which no probability was ever forecast.
        """
        frequency = means["frequency"]
        with np.errstate(invalid="ignore"):
            return {
                "diagram_probability": means["probability"] / frequency,
                "diagram_frequency": frequency,
                OBSERVED_FREQUENCY: means["occurrence"] / frequency,
            }

    def contributions(
        self, cases: Mapping[str, np.ndarray], means: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the contribution of each case to the observed frequency; see `CaseStatistics.contributions`."""
        # The derivative of occurrence / frequency, up to a factor that all cases share.
        return {OBSERVED_FREQUENCY: cases["occurrence"] - metrics[OBSERVED_FREQUENCY] * cases["frequency"]}

    def observed_intervals(self, leads: np.ndarray) -> np.ndarray:
        """Return the 95 % interval of the observed frequency, see `credit.verify.significance.bootstrap`.

        Args:
            leads: (L,) lead times in minutes.

        Returns:
            (2, L, E B, R), lower and upper end. They are NaN for lead times with too few blocks for an interval, and
            for a point that is forecast so rarely that it is missing in a bootstrap resample.
        """
        ends = np.full((2, *self.frequency.shape[1:]), np.nan)
        for number, lead in enumerate(leads.tolist()):
            intervals = confidence_intervals(self, number, lead)
            if intervals:
                ends[:, number] = intervals[OBSERVED_FREQUENCY]
        return ends
