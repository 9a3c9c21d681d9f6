"""Points of reliability diagrams, kept case by case for their confidence intervals.

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
    """Area means of each case, float64; each (N cases, L lead times, E B points of all events, R regions).

    The points of an event follow one another.

    Attributes:
        frequency: area fraction of the cells whose forecast probability falls into the point; the points of an event
            add up to 1.
        probability: area mean of the probability in these cells, with 0 in all others.
        occurrence: area fraction of these cells in which the event then happened.
    """

    frequency: np.ndarray
    probability: np.ndarray
    occurrence: np.ndarray

    @classmethod
    def build(cls, events: EventStatistics) -> Self:
        """Return the points of all events.

        Each probability has a point. If there are more than 11, neighbouring ones share a point, so that there are 11.
        """
        num_probabilities = events.num_members + 1
        num_points = min(num_probabilities, MAX_POINTS)
        edges = np.arange(num_points) * num_probabilities // num_points

        def pool(values_NLERK: np.ndarray) -> np.ndarray:
            # Sum over the probabilities that share a point; events and their points become one dimension.
            pooled_NLEBR = np.moveaxis(np.add.reduceat(values_NLERK, edges, axis=-1), -1, 3)
            return pooled_NLEBR.reshape(*pooled_NLEBR.shape[:2], -1, pooled_NLEBR.shape[-1])

        return cls(
            events.initial_times,
            frequency=pool(events.forecasts),
            probability=pool(events.forecasts * events.probabilities),
            occurrence=pool(events.occurrences),
            num_members=events.num_members,
        )

    def metrics_from_means(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return each of `POINT_NAMES` -> (L, E B, R): forecast probability, its frequency, observed frequency.

        The first and the last are NaN for a point that was never forecast.

        Args:
            means: name of an attribute -> its means over cases, (L, E B, R).
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
        """See `CaseStatistics.contributions`; of the observed frequency alone."""
        return {OBSERVED_FREQUENCY: cases["occurrence"] - metrics[OBSERVED_FREQUENCY] * cases["frequency"]}

    def observed_intervals(self, leads: np.ndarray) -> np.ndarray:
        """Return the ends of the 95 % interval of the observed frequency, (2, L, E B, R).

        They are those of `credit.verify.significance.bootstrap.confidence_intervals`. They are NaN for lead times
        without an interval, and for a point so rare that a resample may lack it.

        Args:
            leads: (L,) lead times in minutes.
        """
        ends = np.full((2, *self.frequency.shape[1:]), np.nan)
        for number, lead in enumerate(leads.tolist()):
            intervals = confidence_intervals(self, number, lead)
            if intervals:
                ends[:, number] = intervals[OBSERVED_FREQUENCY]
        return ends
