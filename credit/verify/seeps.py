"""SEEPS, the stable equitable error in probability space, of deterministic forecasts of accumulated precipitation.

Shapes: L lead times, C channels, R regions, P cells.

Rodwell et al. 2010 (doi:10.1002/qj.656). Three categories, dry, light and heavy, whose limits depend on the climate of
each cell: p1 is the climatological probability of dry, and light is twice as likely as heavy, p3 = (1 - p1) / 3. The
penalty is half the sum of two errors, of the question "wet?" and of the question "heavy?"; a miss costs 1 over the
probability of what was missed, a false alarm 1 over the probability that it does not happen. So every constant
forecast, and one drawn from the climatology, has the expectation 1; a perfect one has 0.

It is for sums over a period (a day in the paper), not for rates at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.verify.addable import AddableSums
from credit.verify.cell_means import CellMeans

DRY_BELOW_MM = 0.25
# in drier and wetter climates the penalties are too large to be stable (Rodwell et al. 2010)
DRY_PROBABILITIES = (0.1, 0.85)


def is_scored(dry_probability: np.ndarray) -> np.ndarray:
    """Return where SEEPS is defined: the climatological probability of dry lies within `DRY_PROBABILITIES`."""
    return (dry_probability >= DRY_PROBABILITIES[0]) & (dry_probability <= DRY_PROBABILITIES[1])


def seeps(forecast: np.ndarray, truth: np.ndarray, dry_probability: np.ndarray, heavy_above: np.ndarray) -> np.ndarray:
    """Return the penalty of each cell.

    Args:
        forecast: (...) precipitation in mm; dry is below `DRY_BELOW_MM`.
        truth: (...) precipitation in mm.
        dry_probability: (...) climatological probability p1 of dry.
        heavy_above: (...) mm, what a third of the wet cases of the climatology exceed.

    Returns:
        (...) float64, 0 where the categories are equal; NaN where not `is_scored` or where a value is.
    """
    p1 = np.where(is_scored(dry_probability), dry_probability, np.nan)
    p3 = (1 - p1) / 3
    heavy = _question(forecast > heavy_above, truth > heavy_above, p3)
    penalty = 0.5 * (_question(forecast >= DRY_BELOW_MM, truth >= DRY_BELOW_MM, 1 - p1) + heavy)
    return np.where(np.isnan(forecast) | np.isnan(truth) | np.isnan(heavy_above), np.nan, penalty)


def _question(forecast: np.ndarray, truth: np.ndarray, probability: np.ndarray) -> np.ndarray:
    """Return the penalty of a yes-or-no forecast of something with a climatological probability."""
    wrong = np.where(truth, 1 / probability, 1 / (1 - probability))
    return np.where(forecast == truth, 0.0 * probability, wrong)


@dataclass
class SeepsSums(AddableSums):
    """Sums over cases of the penalties of one deterministic forecast, each (L, C, R) float64.

    Attributes:
        penalty: area-weighted penalty of the cells that are scored.
        area: their share of the area; `penalty` is divided by it.
    """

    penalty: np.ndarray
    area: np.ndarray

    @classmethod
    def zeros(cls, leads: int, means: CellMeans) -> SeepsSums:
        """Return empty sums."""
        shape = (leads, *means.valid_CP.shape[:1], means.shape[1])
        return cls(np.zeros(leads, dtype=np.int64), *(np.zeros(shape) for _ in range(2)))

    def add(
        self,
        lead: int,
        means: CellMeans,
        forecast_CP: np.ndarray,
        truth_CP: np.ndarray,
        dry_probability_CP: np.ndarray,
        heavy_above_CP: np.ndarray,
    ) -> None:
        """Add one case at one lead time; the C channels of `means` are precipitation sums in mm.

        Forecast and truth are from `CellMeans.flatten`; for the climate of the valid time see `seeps`. A missing
        `heavy_above_CP` where `is_scored` makes the score NaN.
        """
        scored = is_scored(dry_probability_CP) & means.valid_CP
        penalty = seeps(forecast_CP, truth_CP, dry_probability_CP, heavy_above_CP)
        self.penalty[lead] += means.mean(np.where(scored, penalty, 0.0))
        self.area[lead] += means.mean(scored)
        self.cases[lead] += 1

    def metrics(self) -> dict[str, np.ndarray]:
        """Return ``seeps`` -> (L, C, R), 0 perfect, 1 no skill; NaN where no cell of a region is scored."""
        with np.errstate(invalid="ignore"):
            return {"seeps": self.penalty / self.area}
