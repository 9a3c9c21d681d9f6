"""EnsembleSums: errors of an ensemble's mean, its spread and its CRPS, as sums that add up over cases.

Shapes: L lead times, C channels, R regions (`credit.verify.sums.REGIONS`), M members, N cells.
Mean first, root last: every root in `EnsembleSums.metrics` is of a mean over members, cells and cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.verify.addable import AddableSums, require_members
from credit.verify.crps import crps_of_sorted, sorted_deviations
from credit.verify.sums import REGIONS, CellMeans


@dataclass
class EnsembleSums(AddableSums):
    """Sums over cases of one ensemble forecast, each (L, C, R) float64.

    Attributes:
        members: number of members M, the same in all cases.
        absolute: absolute error of the ensemble mean.
        squared: squared error of the ensemble mean.
        variance: unbiased variance over members (divided by M - 1).
        crps: standard CRPS (`credit.verify.crps`).
        crps_fair: fair CRPS.
        forecast_variance: square of the ensemble mean's anomaly to the climatology.
        truth_variance: square of the truth's anomaly.
        covariance: product of the two anomalies.
    """

    members: int
    absolute: np.ndarray
    squared: np.ndarray
    variance: np.ndarray
    crps: np.ndarray
    crps_fair: np.ndarray
    forecast_variance: np.ndarray
    truth_variance: np.ndarray
    covariance: np.ndarray

    @classmethod
    def zeros(cls, leads: int, channels: int, members: int) -> EnsembleSums:
        """Return empty sums."""
        sums = (np.zeros((leads, channels, len(REGIONS))) for _ in range(8))
        return cls(np.zeros(leads, dtype=np.int64), members, *sums)

    def add(
        self, lead: int, means: CellMeans, members_MCN: np.ndarray, truth_CN: np.ndarray, normal_CN: np.ndarray
    ) -> None:
        """Add one case at one lead time.

        Args:
            lead: index of the lead time.
            means: of the C channels.
            members_MCN: the members, from `CellMeans.flatten` each (0 where masked).
            truth_CN: the truth at the valid time, likewise.
            normal_CN: the climatology at the valid time, likewise.

        Raises:
            DataError: if there are not as many members as the sums are for.
        """
        require_members(self.members, len(members_MCN))
        error, variance, crps, crps_fair = (np.empty(truth_CN.size) for _ in range(4))
        for cells, deviation_NM in sorted_deviations(members_MCN, truth_CN):
            error[cells] = deviation_NM.mean(axis=1)
            variance[cells] = deviation_NM.var(axis=1, ddof=1) if self.members > 1 else np.nan
            crps[cells], crps_fair[cells] = crps_of_sorted(deviation_NM)
        error_CN = error.reshape(truth_CN.shape)
        true_anomaly = truth_CN - normal_CN
        anomaly = true_anomaly + error_CN
        self.absolute[lead] += means.mean(np.abs(error_CN))
        self.squared[lead] += means.mean(error_CN**2)
        self.variance[lead] += means.mean(variance.reshape(truth_CN.shape))
        self.crps[lead] += means.mean(crps.reshape(truth_CN.shape))
        self.crps_fair[lead] += means.mean(crps_fair.reshape(truth_CN.shape))
        self.forecast_variance[lead] += means.mean(anomaly**2)
        self.truth_variance[lead] += means.mean(true_anomaly**2)
        self.covariance[lead] += means.mean(anomaly * true_anomaly)
        self.cases[lead] += 1

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric -> (L, C, R); NaN where undefined (spread and fair CRPS of one member; no case).

        - ``rmse``, ``mae``, ``acc``: of the ensemble mean; ``acc`` is the anomaly correlation of all cases pooled,
          without subtracting the mean anomaly.
        - ``spread``: root of the mean variance over members.
        - ``spread_skill``: sqrt((M + 1) / M) spread / rmse, 1 for an ensemble that is statistically consistent with
          the truth, below 1 for one with too little spread (Fortin et al. 2014, doi:10.1175/JHM-D-14-0008.1).
        - ``crps``, ``crps_fair``.
        - ``rmse_member``: root of the mean squared error of single members.

        Why the root of the factor, and why last: let truth and members be independent draws of one distribution with
        variance V, another one in each cell and case. The ensemble mean has the variance V / M and the truth V, both
        about the same expectation, so the expected squared error of the ensemble mean is V (M + 1) / M, and that of
        the variance over members (divided by M - 1) is V. Both relations are linear, hence they hold for means over
        cells and cases with whatever V, and the root of their ratio is sqrt((M + 1) / M) spread / rmse. They do not
        hold for standard deviations: the mean of roots is smaller than the root of the mean.

        The squared error of members needs no sum: averaged over members it is the squared error of their mean plus
        the variance about it, which is (M - 1) / M of the unbiased one.
        """
        count = self.members
        squared, variance = self.average(self.squared), self.average(self.variance)
        about_mean = variance * (count - 1) / count if count > 1 else 0.0
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "rmse": np.sqrt(squared),
                "mae": self.average(self.absolute),
                "acc": self.covariance / np.sqrt(self.forecast_variance * self.truth_variance),
                "spread": np.sqrt(variance),
                "spread_skill": np.sqrt((count + 1) / count * variance / squared),
                "crps": self.average(self.crps),
                "crps_fair": self.average(self.crps_fair),
                "rmse_member": np.sqrt(squared + about_mean),
            }
