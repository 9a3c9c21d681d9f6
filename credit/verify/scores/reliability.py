"""Points of reliability diagrams, stored for each case so that confidence intervals of the points can be computed.

A point shows the observed frequency of an event in the cells where a certain probability was forecast. For large
ensembles, a point combines a few neighbouring probabilities.

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

# Largest number of points of a diagram. Neighbouring probabilities of large ensembles share a point.
MAX_POINTS = 11
# Names of the results for each point: mean forecast probability, frequency with which the probabilities of the point
# were forecast, and observed frequency of the event.
OBSERVED_FREQUENCY = "diagram_observed"
POINT_NAMES = ("diagram_probability", "diagram_frequency", OBSERVED_FREQUENCY)


@dataclass
class ReliabilityStatistics(CaseStatistics):
    """Area means for the points of all events, for each case and lead time, each (N, L, E * B, R) float64.

    The third dimension contains the B points of the first event, then the B points of the second event, and so on.

    Attributes:
        frequency: area fraction of the region in which a probability of the point was forecast. The sum over the points
            of an event is 1.
        probability: area mean of the forecast probability; cells where no probability of the point was forecast
            contribute 0.
        occurrence: area fraction of the region in which a probability of the point was forecast and the event occurred.
    """

    frequency: np.ndarray
    probability: np.ndarray
    occurrence: np.ndarray

    @classmethod
    def build(cls, events: EventStatistics) -> Self:
        """Build the area means of the points from the statistics of the events.

        Each forecast probability has a separate point. If there are more than 11 probabilities, neighbouring
        probabilities are pooled into 11 points.
        """
        num_probabilities = events.num_members + 1
        num_points = min(num_probabilities, MAX_POINTS)
        # Index of the first probability of each point; the numbers of probabilities of two points differ by at most 1.
        edges = np.arange(num_points) * num_probabilities // num_points

        def pool(values_NLERK: np.ndarray) -> np.ndarray:
            # The values of the probabilities of a point are added; events and points become one dimension.
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
        """Return the mean forecast probability, the forecast frequency and the observed frequency of each point.

        Args:
            means: name of each attribute -> mean of the attribute over cases; all means have the same shape.

        Returns:
            Each of `POINT_NAMES` -> values of this shape. The mean forecast probability and the observed frequency are
            NaN for a point whose probabilities were never forecast.
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
        # The contribution is the derivative of occurrence / frequency, up to a factor that is equal for all cases.
        return {OBSERVED_FREQUENCY: cases["occurrence"] - metrics[OBSERVED_FREQUENCY] * cases["frequency"]}

    def observed_intervals(self, leads: np.ndarray) -> np.ndarray:
        """Return the 95 % interval of the observed frequency, see `credit.verify.significance.bootstrap`.

        Args:
            leads: (L,) lead times in minutes.

        Returns:
            (2, L, E * B, R): lower and upper end; E events with B points each, as in the class. NaN where there are too
            few blocks, or where a point's probability is forecast so rarely that some resample lacks it.
        """
        ends = np.full((2, *self.frequency.shape[1:]), np.nan)
        for number, lead in enumerate(leads.tolist()):
            intervals = confidence_intervals(self, number, lead)
            if intervals:
                ends[:, number] = intervals[OBSERVED_FREQUENCY]
        return ends
