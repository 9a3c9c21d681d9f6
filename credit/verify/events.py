"""EventSums: Brier score, its parts and the reliability diagram of threshold exceedances, as sums over cases.

Shapes: L lead times, E events, C channels, R regions, M members, P cells.

An ensemble of M members has M + 1 possible probabilities k / M. So how often each was forecast, and how often the
event then happened, is all that the Brier score, its fair version and its decomposition need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.verify.addable import AddableSums, require_members
from credit.verify.cell_means import CellMeans


@dataclass
class EventSums(AddableSums):
    """Sums over cases of the events "the value exceeds a threshold", area-weighted.

    Attributes:
        members: number of members M, the same in all cases.
        forecasts: (L, E, C, R, M + 1) float64, frequency of cells where k members exceed the threshold; each case
            adds 1 in all.
        occurrences: (L, E, C, R, M + 1) float64, frequency of those among them where the truth does, too.
        reference: (L, E, C, R) float64, squared error of the climatological probability.
    """

    members: int
    forecasts: np.ndarray
    occurrences: np.ndarray
    reference: np.ndarray

    @classmethod
    def zeros(cls, leads: int, events: int, means: CellMeans, members: int) -> EventSums:
        """Return empty sums."""
        shape = (leads, events, *means.valid_CP.shape[:1], means.shape[1])
        counts = (np.zeros((*shape, members + 1)) for _ in range(2))
        return cls(np.zeros(leads, dtype=np.int64), members, *counts, np.zeros(shape))

    def add(
        self,
        lead: int,
        means: CellMeans,
        members_MCP: np.ndarray,
        truth_CP: np.ndarray,
        thresholds_ECP: np.ndarray,
        climatology_ECP: np.ndarray,
    ) -> None:
        """Add one case at one lead time.

        Args:
            lead: index of the lead time.
            means: of the C channels.
            members_MCP: the members, from `CellMeans.flatten` each.
            truth_CP: the truth, likewise.
            thresholds_ECP: thresholds in the channels' units, a value for all cells (E, C, 1) or one for each, such
                as a quantile of the climatology; the event is a value above it.
            climatology_ECP: climatological probability of the event, (E, C, 1) or one for each cell: what skill is
                measured against. Of the threshold that is the quantile q it is 1 - q. One probability for cells whose
                climates differ makes skill of knowing the climate (Hamill and Juras 2006).

        Raises:
            DataError: if there are not as many members as the sums are for.
        """
        require_members(self.members, len(members_MCP))
        for event, (threshold, climatology) in enumerate(zip(thresholds_ECP, climatology_ECP, strict=True)):
            happened = truth_CP > threshold
            count = np.zeros(truth_CP.shape, dtype=np.int32)
            for member_CP in members_MCP:
                count += member_CP > threshold
            for k in range(self.members + 1):
                forecast = (count == k) & means.valid_CP
                self.forecasts[lead, event, :, :, k] += means.mean(forecast)
                self.occurrences[lead, event, :, :, k] += means.mean(forecast & happened)
            self.reference[lead, event] += means.mean(np.where(means.valid_CP, (climatology - happened) ** 2, 0.0))
        self.cases[lead] += 1

    def diagram(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the reliability diagram.

        Returns:
            The forecast probabilities k / M, (M + 1,); how often each was forecast, (L, E, C, R, M + 1), adding up to
            1; how often the event then happened, (L, E, C, R, M + 1), NaN for a probability never forecast.
        """
        with np.errstate(invalid="ignore"):
            observed = self.occurrences / self.forecasts
        return np.arange(self.members + 1) / self.members, self.average(self.forecasts), observed

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric -> (L, E, C, R), with p = k / M, o the truth (0 or 1) and mean over cells and cases.

        - ``brier``: mean of (p - o)^2.
        - ``brier_fair``: less the mean of p (1 - p) / (M - 1), so that its expectation does not depend on M (Ferro
          2014, doi:10.1002/qj.2270); NaN of one member.
        - ``reliability``: mean of (p - observed frequency given p)^2; ``resolution``: mean of (that frequency - the
          base rate)^2; ``uncertainty``: base rate (1 - base rate). ``brier`` = reliability - resolution + uncertainty
          exactly, as each p has its own bin (Murphy 1973, J. Appl. Meteor. 12, 595-600).
        - ``brier_skill``, ``brier_skill_fair``: 1 - score / score of the climatological probability.
        """
        count = self.members
        p = np.arange(count + 1) / count
        forecast, happened = self.average(self.forecasts), self.average(self.occurrences)
        brier = ((forecast - happened) * p**2 + happened * (1 - p) ** 2).sum(axis=-1)
        correction = (forecast * p * (1 - p)).sum(axis=-1) / (count - 1) if count > 1 else np.nan
        base = happened.sum(axis=-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            weight = np.where(forecast == 0, 0.0, 1.0 / forecast)
            reference = self.average(self.reference)
            return {
                "brier": brier,
                "brier_fair": brier - correction,
                "reliability": (weight * (forecast * p - happened) ** 2).sum(axis=-1),
                "resolution": (weight * (happened - forecast * base[..., None]) ** 2).sum(axis=-1),
                "uncertainty": base * (1 - base),
                "brier_skill": 1 - brier / reference,
                "brier_skill_fair": 1 - (brier - correction) / reference,
            }
