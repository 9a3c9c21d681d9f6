"""DiagramSums: the points of reliability diagrams, kept case by case for their intervals.

Shapes: N cases, L lead times, E events, R regions, K = M + 1 probabilities of M members, B points of a diagram.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from credit.verify.scores.events import EventStatistics
from credit.verify.significance.bootstrap import intervals
from credit.verify.statistics.case_statistics import CaseStatistics

MOST_POINTS = 11  # of large ensembles neighbouring probabilities are one point
OBSERVED = "diagram_observed"
POINTS = ("diagram_probability", "diagram_frequency", OBSERVED)


@dataclass
class ReliabilityStatistics(CaseStatistics):
    """Area means of each case, each (N, L, E B, R) float64, the points of an event next to each other.

    Attributes:
        frequency: of cells where a point's probabilities were forecast; those of an event add up to 1.
        probability: sum of what was forecast there.
        happened: frequency of those among them where the event then happened.
    """

    frequency: np.ndarray
    probability: np.ndarray
    happened: np.ndarray

    @classmethod
    def build(cls, events: EventStatistics) -> Self:
        """Return the points of all events: each probability one, of more than 11 as many neighbours as it takes."""
        count = events.members + 1
        points = min(count, MOST_POINTS)
        edges = np.arange(points) * count // points

        def pool(values_NLERK: np.ndarray) -> np.ndarray:
            pooled = np.moveaxis(np.add.reduceat(values_NLERK, edges, axis=-1), -1, 3)
            return pooled.reshape(*pooled.shape[:2], -1, pooled.shape[-1])

        planes = events.forecasts, events.forecasts * events.probabilities, events.occurrences
        return cls(events.initial, *(pool(own) for own in planes), members=events.members)

    def metrics(self) -> dict[str, np.ndarray]:
        """Return `POINTS` -> (L, E B, R): mean forecast probability, how often it was forecast, observed frequency.

        The first and the last are NaN where a point was never forecast.
        """
        return self.metrics_of({name: own.mean(axis=0) for name, own in self.planes().items()})

    def metrics_of(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `metrics`."""
        frequency = means["frequency"]
        with np.errstate(invalid="ignore"):
            found = means["probability"] / frequency, frequency, means["happened"] / frequency
        return dict(zip(POINTS, found, strict=True))

    def contributions(
        self, cases: Mapping[str, np.ndarray], means: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """See `CaseStatistics.contributions`; of the observed frequency alone."""
        return {OBSERVED: cases["happened"] - metrics[OBSERVED] * cases["frequency"]}

    def observed_intervals(self, leads: np.ndarray) -> np.ndarray:
        """Return the ends of the 95 % interval of the observed frequency, (2, L, E B, R).

        See `credit.verify.significance.bootstrap.intervals`; NaN, too, for a point so rare that a resample may lack it.

        Args:
            leads: (L,) lead times in minutes.
        """
        ends = np.full((2, *self.frequency.shape[1:]), np.nan)
        for number, lead in enumerate(leads.tolist()):
            if found := intervals(self, number, lead):
                ends[:, number] = found[OBSERVED]
        return ends
