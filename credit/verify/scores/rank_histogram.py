"""Rank histograms of an ensemble: frequencies of the rank of the truth among the members, summed over cases.

Shapes: L lead times, C channels, R regions, M members, K = M + 1 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.errors import DataError
from credit.verify.statistics.area_mean import AreaMean

# The frequencies of each case are rounded to multiples of 1 / _ROUNDING. Sums of up to 8192 cases are then exact in
# float64.
_ROUNDING = 2.0**40


@dataclass
class RankHistogram:
    """Area-weighted frequency of each rank of the truth among the members, summed over cases (Hamill 2001).

    The rank is the number of members below the truth, so rank 0 means a truth below all members. If truth and members
    are exchangeable, every rank is equally likely and the histogram is flat. A truth that equals t members (for
    example, no precipitation) has t + 1 possible ranks and adds 1 / (t + 1) to each of them.

    Hamill (2001): Interpretation of rank histograms for verifying ensemble forecasts, Mon. Wea. Rev. 129, 550-560.

    Attributes:
        cases: (L,) int64 number of cases added at each lead time.
        num_members: number of members M, the same in all cases.
        ranks: (L, C, R, K) float64 sums over cases of the area fraction in which the truth has each rank. The sum of
            the fractions of a case differs from 1 by at most (M + 1) 2^-41. The sums over cases have no rounding error,
            so they do not depend on the order of the cases or on the number of processes.
    """

    cases: np.ndarray
    num_members: int
    ranks: np.ndarray

    @classmethod
    def zeros(cls, num_leads: int, area_mean: AreaMean, num_members: int) -> RankHistogram:
        """Return a histogram without cases, for L lead times and the channels and regions of `area_mean`."""
        shape = (num_leads, *area_mean.valid_CP.shape[:1], area_mean.shape[1], num_members + 1)
        return cls(np.zeros(num_leads, dtype=np.int64), num_members, np.zeros(shape))

    def add(self, lead: int, frequency_CRK: np.ndarray) -> None:
        """Add one case at one lead time.

        Args:
            lead: index of the lead time.
            frequency_CRK: area fraction in which the truth has each rank; the sum over K is 1.
        """
        # Sums of multiples of a power of two have no rounding error.
        self.ranks[lead] += np.rint(frequency_CRK * _ROUNDING) / _ROUNDING
        self.cases[lead] += 1

    def __add__(self, other: RankHistogram) -> RankHistogram:
        """Return the histogram of the cases of both histograms.

        Raises:
            DataError: if the ensembles have different numbers of members.
        """
        if self.num_members != other.num_members:
            raise DataError(
                f"ranks among {self.num_members} members and among {other.num_members} cannot be added: their "
                "histograms have different numbers of ranks; score ensembles of different size separately"
            )
        # The shapes are equal, because all processes score the same lead times, channels and regions.
        assert self.ranks.shape == other.ranks.shape
        return RankHistogram(self.cases + other.cases, self.num_members, self.ranks + other.ranks)

    def frequencies(self) -> np.ndarray:
        """Return the relative frequency of each rank, (L, C, R, K); the sum over K is 1. NaN without cases."""
        with np.errstate(invalid="ignore"):
            return self.ranks / self.cases[:, None, None, None]

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric name -> (L, C, R) float64, NaN at lead times without cases.

        - ``rank_deviation``: sum over ranks of the absolute difference between the frequency and 1 / (M + 1). The value
          is 0 for a flat histogram and 2 M / (M + 1) if the truth always has the same rank. With few cases, the value
          is positive even for a perfect ensemble. This is the reliability index of Delle Monache et al. 2006
          (doi:10.1029/2005JD006917).
        - ``rank_outliers``: frequency of a truth outside the ensemble, divided by its value 2 / (M + 1) in a flat
          histogram. Above 1, the spread is too small or the ensemble has a bias; below 1, the spread is too large.
        """
        frequencies = self.frequencies()
        flat_frequency = 1.0 / (self.num_members + 1)
        # In the first rank, the truth is below all members; in the last rank, it is above all members.
        outliers = frequencies[..., 0] + frequencies[..., -1]
        return {
            "rank_deviation": np.abs(frequencies - flat_frequency).sum(axis=-1),
            "rank_outliers": outliers / (2 * flat_frequency),
        }
