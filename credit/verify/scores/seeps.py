"""SEEPS, the stable equitable error in probability space, of deterministic forecasts of accumulated precipitation.

Shapes: N cases, L lead times, C channels of precipitation, R regions, M members, P cells.

Rodwell et al. 2010 (doi:10.1002/qj.656). Three categories, dry, light and heavy, whose limits depend on the climate of
each cell: p1 is the climatological probability of dry, and light is twice as likely as heavy, p3 = (1 - p1) / 3. The
penalty is half the sum of two errors, of the question "wet?" and of the question "heavy?"; a miss costs 1 over the
probability of what was missed, a false alarm 1 over the probability that it does not happen. So every constant
forecast, and one drawn from the climatology, has the expectation 1; a perfect one has 0.

It is for sums over a period (a day in the paper), not for rates at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.case_statistics import CaseStatistics

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
class SeepsSums(CaseStatistics):
    """Area means of the penalties of each case, each (N, L, C, R) float64.

    Of an ensemble it is the mean over members: what each is worth as a forecast. The mean of an ensemble drizzles where
    some members have rain, so that its categories are not those of any weather.

    Attributes:
        penalty: area-weighted penalty of the cells that are scored.
        area: their share of the area; `penalty` is divided by it.
    """

    penalty: np.ndarray
    area: np.ndarray

    @classmethod
    def empty(cls, initial: np.ndarray, leads: int, channels: int, regions: int, members: int = 1) -> Self:
        """Return room for the cases that start at `initial`; NaN until they are added."""
        shape = len(initial), leads, channels, regions
        planes = (np.full(shape, np.nan) for _ in range(2))
        return cls(np.asarray(initial, dtype=np.int64), *planes, members=members)

    def add(
        self,
        place: tuple[int, int, int],
        means: AreaMean,
        channel: int,
        members_MP: np.ndarray,
        truth_P: np.ndarray,
        dry_probability_P: np.ndarray,
        heavy_above_P: np.ndarray,
    ) -> None:
        """Enter one channel of one case at one lead time.

        Args:
            place: numbers of the case, the lead time and the channel among those that are scored.
            means: area means.
            channel: which of their channels it is; for its mask.
            members_MP: precipitation in mm of each member, whatever where masked.
            truth_P: precipitation in mm, likewise.
            dry_probability_P: of the climate of the valid time, see `seeps`.
            heavy_above_P: likewise; a missing one where `is_scored` makes the score NaN.
        """
        self._require_members(len(members_MP))
        scored = is_scored(dry_probability_P) & means.valid_CP[channel]
        penalty = sum(seeps(member_P, truth_P, dry_probability_P, heavy_above_P) for member_P in members_MP)
        rows = np.stack([np.where(scored, penalty / self.members, 0.0), scored])
        self.penalty[place], self.area[place] = means.means_of_channel(rows, channel)

    def metrics(self) -> dict[str, np.ndarray]:
        """Return ``seeps`` -> (L, C, R), 0 perfect, 1 no skill; NaN where no cell of a region is scored."""
        return self.metrics_of({name: own.mean(axis=0) for name, own in self.planes().items()})

    def metrics_of(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `metrics`."""
        with np.errstate(invalid="ignore"):
            return {"seeps": means["penalty"] / means["area"]}

    def contributions(
        self, cases: Mapping[str, np.ndarray], means: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """See `CaseStatistics.contributions`."""
        return {"seeps": cases["penalty"] - metrics["seeps"] * cases["area"]}
