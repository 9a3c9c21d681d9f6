"""Score sums: what every score needs of each case, kept case by case.

A metric is a function of the means over cases; mean first, root last. Seasons, resampling and paired tests choose among
the cases without a second pass over the fields. All sums are float64.

Shapes: N cases, L lead times, C channels, V wind vectors, X = C + V rows, R regions, P cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from credit.data.climatology.climatology import Fields
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.case_statistics import CaseStatistics
from credit.verify.statistics.error_moments import Moments, error_moments


@dataclass
class DeterministicStatistics(CaseStatistics):
    """Area means of each case of one forecast, of an ensemble of its mean; each plane is (N, L, X, R) float64.

    The rows are the channels, then the wind vectors, whose squares and products are sums over both components.

    Attributes:
        error: forecast minus truth; of a vector: of its length.
        absolute: the absolute error; of a vector: the length of the vector error.
        squared: the squared error.
        forecast_variance: square of the forecast's anomaly to the climatology.
        truth_variance: square of the truth's anomaly.
        covariance: product of the two anomalies.
        forecast_activity: variance of the forecast's anomaly about its area mean.
        truth_activity: that of the truth's.
    """

    error: np.ndarray
    absolute: np.ndarray
    squared: np.ndarray
    forecast_variance: np.ndarray
    truth_variance: np.ndarray
    covariance: np.ndarray
    forecast_activity: np.ndarray
    truth_activity: np.ndarray

    @classmethod
    def empty(cls, initial: np.ndarray, leads: int, means: AreaMean, members: int = 1) -> Self:
        """Return room for the cases that start at `initial`; NaN until they are added."""
        shape = len(initial), leads, *means.shape
        planes = {name: np.full(shape, np.nan) for name in cls.plane_names()}
        return cls(np.asarray(initial, dtype=np.int64), **planes, members=members)

    def add(
        self, case: int, lead: int, means: AreaMean, forecast: np.ndarray, truth: np.ndarray, normal: Fields,
        names: Sequence[str] = ("forecast", "truth", "climatology"),
    ) -> None:  # fmt: skip
        """Enter one field.

        Args:
            case: number of the case.
            lead: number of the lead time.
            means: of the C channels.
            forecast: (C, H, W) or (C, P), whatever where masked.
            truth: likewise.
            normal: likewise, the climatology at the valid time.
            names: what errors call the three.

        Raises:
            DataError: if a value outside the mask is missing.
        """
        fields = dict(zip(names, (forecast, truth, normal), strict=True))
        moments = error_moments(means, truth, normal, {"forecast": forecast}, fields)
        self.enter((case, lead), means, moments["forecast"])

    def enter(self, place: tuple[int, int], means: AreaMean, moments: Moments) -> None:
        """Enter what was found of one field; `place` is the number of the case and of the lead time."""
        true, true_true, _ = moments.truth
        error, absolute, squared, own_own, product = moments.channels
        self.error[place] = np.concatenate([error, moments.vectors[0]])
        self.absolute[place] = np.concatenate([absolute, moments.vectors[1]])
        self.squared[place] = means.with_vectors(squared)
        self.forecast_variance[place] = means.with_vectors(own_own)
        self.truth_variance[place] = means.with_vectors(true_true)
        self.covariance[place] = means.with_vectors(product)
        # rounding may leave a little less than nothing
        self.forecast_activity[place] = means.with_vectors(np.maximum(own_own - (true + error) ** 2, 0.0))
        self.truth_activity[place] = means.with_vectors(np.maximum(true_true - true**2, 0.0))

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric -> (L, X, R): those of `metrics_of`, and ``acc_wb2`` and the activities.

        ``acc_wb2`` is the mean of each case's correlation (WeatherBench 2, Rasp et al. 2024, eq. 6). ``activity`` is
        the standard deviation in space of the forecast's anomaly, ``activity_truth`` that of the truth's; the mean over
        cases is taken of the variance.
        """
        means = {name: own.mean(axis=0) for name, own in self.planes().items()}
        each = _ratio(self.covariance, self.forecast_variance * self.truth_variance)
        activity, truth = (np.sqrt(means[name]) for name in ("forecast_activity", "truth_activity"))
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                **self.metrics_of(means),
                "acc_wb2": each.mean(axis=0),
                "activity": activity,
                "activity_truth": truth,
                "activity_ratio": np.where(truth > 0, activity / truth, np.nan),
            }

    def metrics_of(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return metric -> values, of means over cases of any shape.

        The means are named as in `DeterministicStatistics` or `EnsembleStatistics`.

        - ``rmse``: root of the mean over cases; ``bias``, ``mae``.
        - ``acc``: the anomaly correlation of all cases pooled, without subtracting the mean anomaly.
        - ``crps``: of an ensemble, and of a single forecast the absolute error (of a vector: the energy score).

        Of an ensemble of M members the first four are those of its mean, and there are:

        - ``crps_fair``: `credit.verify.scores.crps`.
        - ``spread``: root of the mean variance over members.
        - ``spread_skill``: sqrt((M + 1) / M) spread / rmse, 1 for an ensemble that is statistically consistent with the
          truth, below 1 for one with too little spread (Fortin et al. 2014, doi:10.1175/JHM-D-14-0008.1).
        - ``rmse_member``: root of the mean squared error of single members.

        Why the root of the factor, and why last: let truth and members be independent draws of one distribution with
        variance V, another one in each cell and case. The ensemble mean has the variance V / M and the truth V, both
        about the same expectation, so the expected squared error of the ensemble mean is V (M + 1) / M, and that of the
        variance over members (divided by M - 1) is V. Both relations are linear, hence they hold for means over cells
        and cases with whatever V, and the root of their ratio is sqrt((M + 1) / M) spread / rmse. They do not hold for
        standard deviations: the mean of roots is smaller than the root of the mean.

        The squared error of members needs no sum: averaged over members it is the squared error of their mean plus the
        variance about it, which is (M - 1) / M of the unbiased one.
        """
        found = {
            "rmse": np.sqrt(means["squared"]),
            "bias": means["error"],
            "mae": means["absolute"],
            "acc": _ratio(means["covariance"], means["forecast_variance"] * means["truth_variance"]),
            "crps": means["crps"] if self.members > 1 else means["absolute"],
        }
        if self.members == 1:
            return found
        squared, variance = means["squared"], means["variance"]
        with np.errstate(invalid="ignore", divide="ignore"):
            return found | {
                "crps_fair": means["crps_fair"],
                "spread": np.sqrt(variance),
                "spread_skill": np.sqrt((self.members + 1) / self.members * variance / squared),
                "rmse_member": np.sqrt(squared + variance * (self.members - 1) / self.members),
            }

    def crps_of_cases(self) -> np.ndarray:
        """Return the CRPS of each case, (N, L, X, R): the absolute error of a single forecast."""
        return self.absolute

    def crps_fair_of_cases(self) -> np.ndarray:
        """Return the fair CRPS of each case, (N, L, X, R): NaN of a single forecast, which has none."""
        return np.full_like(self.absolute, np.nan)

    def contributions(
        self, cases: Mapping[str, np.ndarray], means: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """See `CaseStatistics.contributions`."""
        with np.errstate(invalid="ignore", divide="ignore"):
            variances = (cases[n] / means[n] for n in ("forecast_variance", "truth_variance"))
            product = cases["covariance"] / np.sqrt(means["forecast_variance"] * means["truth_variance"])
            correlation = product - metrics["acc"] / 2 * sum(variances)
            found = {"rmse": cases["squared"], "bias": cases["error"], "mae": cases["absolute"], "acc": correlation}
            found["crps"] = cases.get("crps", cases["absolute"])
            if "crps_fair" in cases:
                found["crps_fair"] = cases["crps_fair"]
                found["spread_skill"] = cases["variance"] / means["variance"] - cases["squared"] / means["squared"]
        return found


def _ratio(covariance: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return covariance / sqrt(squares), NaN where there is no variance."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return covariance / np.sqrt(squares)
