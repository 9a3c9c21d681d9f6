"""SEEPS, the stable equitable error in probability space, of deterministic forecasts of accumulated precipitation.

Source: Rodwell et al. 2010 (doi:10.1002/qj.656). There are three categories: dry, light and heavy. The climatological
probability of dry is p1. The threshold between light and heavy is chosen for each cell so that light is twice as likely
as heavy. The probability of heavy is then p3 = (1 - p1) / 3. The score treats a forecast as the answers to two
questions, "is it wet?" and "is it heavy?". Let p be the climatological probability that the answer is yes. A missed
"yes" costs 1 / p, and a false alarm costs 1 / (1 - p). The penalty is half the sum of the costs of both answers. The
expected penalty is 0 for a perfect forecast, and 1 for a constant forecast or a random sample of the climatology.

SEEPS is defined for sums over a period (a day in the paper), not for instantaneous rates.

Shapes: N cases, L lead times, C channels of precipitation, R regions, M members, H x W = P cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.case_statistics import CaseStatistics

# Threshold of the category dry: the sum of precipitation is below this value.
DRY_BELOW_MM = 0.25
# Range of the climatological probability of dry in which SEEPS is defined. In drier and wetter climates, the penalties
# are too large to be stable (Rodwell et al. 2010).
DRY_PROBABILITIES = (0.1, 0.85)


def is_seeps_defined(dry_probability: np.ndarray) -> np.ndarray:
    """Return a mask, (...) bool, True where the probability of dry is in the range `DRY_PROBABILITIES`.

    SEEPS is not defined in cells where the mask is False.

    Args:
        dry_probability: (...) climatological probability of dry; NaN gives False.
    """
    return (dry_probability >= DRY_PROBABILITIES[0]) & (dry_probability <= DRY_PROBABILITIES[1])


def compute_seeps_penalty(
    forecast: np.ndarray, truth: np.ndarray, dry_probability: np.ndarray, heavy_above: np.ndarray
) -> np.ndarray:
    """Return the SEEPS penalty of each cell, see the module docstring.

    Args:
        forecast: (...) precipitation in mm; dry is below `DRY_BELOW_MM`.
        truth: (...) precipitation in mm.
        dry_probability: (...) climatological probability p1 of dry, 0 to 1.
        heavy_above: (...) threshold of heavy precipitation in mm; a third of the wet values of the climatology exceed
            the threshold.

    Returns:
        (...) float64, 0 where the categories are equal; NaN where SEEPS is not defined or a value is missing.
    """
    # In the notation of the paper, p1 is the probability of dry, and p3 is the probability of heavy.
    p1 = np.where(is_seeps_defined(dry_probability), dry_probability, np.nan)
    p3 = (1 - p1) / 3
    wet_penalty = _compute_binary_penalty(forecast >= DRY_BELOW_MM, truth >= DRY_BELOW_MM, 1 - p1)
    heavy_penalty = _compute_binary_penalty(forecast > heavy_above, truth > heavy_above, p3)
    # A comparison with NaN is False, so without this mask a missing value would be treated as dry.
    is_missing = np.isnan(forecast) | np.isnan(truth) | np.isnan(heavy_above)
    return np.where(is_missing, np.nan, 0.5 * (wet_penalty + heavy_penalty))


def _compute_binary_penalty(forecast: np.ndarray, truth: np.ndarray, probability: np.ndarray) -> np.ndarray:
    """Return the cost of a yes-or-no forecast of one category, (...) float64; see the module docstring.

    Args:
        forecast: (...) bool, True if the category is forecast.
        truth: (...) bool, True if the category occurred.
        probability: (...) climatological probability of the category. The cost is NaN where the probability is NaN.
    """
    error_cost = np.where(truth, 1 / probability, 1 / (1 - probability))
    # The product with 0 is NaN where the probability is NaN.
    return np.where(forecast == truth, 0.0 * probability, error_cost)


@dataclass
class SeepsStatistics(CaseStatistics):
    """Area means of the SEEPS penalties for each case and lead time, each (N, L, C, R) float64.

    The penalty of an ensemble is the mean of the penalties of its members. The ensemble mean is not scored, because it
    unrealistically has light rain in all cells where only some members have rain.

    Attributes:
        penalty: area mean of the penalty over the complete region; cells where SEEPS is not defined contribute 0.
        area: area fraction of the region in which SEEPS is defined; the score is `penalty` / `area`.
    """

    penalty: np.ndarray
    area: np.ndarray

    @classmethod
    def empty(
        cls, initial_times: np.ndarray, num_leads: int, num_channels: int, num_regions: int, num_members: int = 1
    ) -> Self:
        """Return new statistics of the cases with these initial times, (N,) in minutes; all values are NaN."""
        shape = len(initial_times), num_leads, num_channels, num_regions
        penalty = np.full(shape, np.nan)
        area = np.full(shape, np.nan)
        return cls(np.asarray(initial_times, dtype=np.int64), penalty, area, num_members=num_members)

    def add(
        self,
        index: tuple[int, int, int],
        area_mean: AreaMean,
        channel: int,
        members_MP: np.ndarray,
        truth_P: np.ndarray,
        dry_probability_P: np.ndarray,
        heavy_above_P: np.ndarray,
    ) -> None:
        """Add one channel of one case at one lead time.

        Args:
            index: (index of the case, index of the lead time, index among the channels of precipitation).
            area_mean: area means over the regions.
            channel: index of the channel in `area_mean`; the mask of this channel is used.
            members_MP: precipitation of each member in mm; masked cells may contain any value.
            truth_P: precipitation of the truth in mm; masked cells may contain any value.
            dry_probability_P: climatological probability of dry at the time of the year of the valid time.
            heavy_above_P: climatological threshold of heavy precipitation in mm at this time of the year. If it is NaN
                in a cell where SEEPS is defined, the score is NaN.

        Raises:
            DataError: if the number of members differs from other cases.
        """
        self.require_members(len(members_MP))
        is_defined_P = is_seeps_defined(dry_probability_P) & area_mean.valid_CP[channel]
        # The penalties of the members are added one at a time to save memory.
        penalty_P = 0.0
        for member_P in members_MP:
            penalty_P = penalty_P + compute_seeps_penalty(member_P, truth_P, dry_probability_P, heavy_above_P)
        # Both means are over complete regions; the score is the penalty divided by the area where SEEPS is defined.
        mean_penalty_P = np.where(is_defined_P, penalty_P / self.num_members, 0.0)
        fields_2P = np.stack([mean_penalty_P, is_defined_P])
        penalty_R, area_R = area_mean.means_of_channel(fields_2P, channel)
        self.penalty[index] = penalty_R
        self.area[index] = area_R

    def metrics_from_means(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return "seeps" -> (L, C, R) score: 0 is perfect, 1 is no skill; NaN if SEEPS is defined in no cell."""
        with np.errstate(invalid="ignore"):
            return {"seeps": means["penalty"] / means["area"]}

    def contributions(
        self, cases: Mapping[str, np.ndarray], means: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the contribution of each case to SEEPS; see `CaseStatistics.contributions`."""
        # The contribution is the derivative of penalty / area, up to a factor that is equal for all cases.
        return {"seeps": cases["penalty"] - metrics["seeps"] * cases["area"]}
