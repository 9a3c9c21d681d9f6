"""Statistics of each case; all scores are computed from them.

A score is a function of means over cases; a root, as in RMSE, is computed last. Because area means are stored for each
case, results of several processes can be joined. Seasons, bootstrap resamples and paired tests select cases without a
second pass over the fields. All statistics are float64.

Shapes: N cases, L lead times, C channels, V wind vectors, X = C + V rows, R regions, M members, H x W = P cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from credit.errors import DataError
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.ensemble_kernels import NUM_MEMBER_SUMS, crps_from_sums, member_sums, vector_member_sums
from credit.verify.statistics.error_moments import (
    ErrorMoments,
    ReferenceFields,
    choose_wind_scale,
    compute_error_moments,
)


@dataclass
class CaseStatistics:
    """Base class of statistics of one forecast; each array field of a subclass is (N, L, ...) float64.

    Attributes:
        initial_times: (N,) initial times in minutes, increasing.
        num_members: number of members of an ensemble; 1 for a single forecast.
    """

    initial_times: np.ndarray
    num_members: int = field(default=1, kw_only=True)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the statistics of the cases of all parts, in the order of the initial times.

        Raises:
            DataError: if two parts have the same case, or different numbers of members.
        """
        initial_times = np.concatenate([part.initial_times for part in parts])
        order = np.argsort(initial_times)
        if (np.diff(initial_times[order]) == 0).any():
            raise DataError(
                "scores of two parts cannot be joined: they have an initial time in common; each process must score "
                "different cases"
            )
        member_counts = {part.num_members for part in parts}
        if len(member_counts) > 1:
            raise DataError(
                f"scores of ensembles of {member_counts} members cannot be joined: they depend on the number of "
                "members; score ensembles of different size separately"
            )
        arrays = {}
        for name in cls.array_names():
            arrays[name] = np.concatenate([getattr(part, name) for part in parts])[order]
        return cls(initial_times[order], **arrays, num_members=member_counts.pop())

    def select(self, is_selected: np.ndarray) -> Self:
        """Return the statistics of the cases for which `is_selected`, (N,) bool, is True."""
        arrays = {name: values[is_selected] for name, values in self.arrays().items()}
        return dataclasses.replace(self, initial_times=self.initial_times[is_selected], **arrays)

    def require_members(self, num_members: int) -> None:
        """Raise a DataError unless `num_members` is the number of members for which the statistics were created."""
        if self.num_members < 1 or num_members != self.num_members:
            raise DataError(
                f"a forecast has {num_members} members, the statistics are for {self.num_members}: corrections for a "
                "finite ensemble need the same number for all cases; score forecasts with other numbers separately"
            )

    @classmethod
    def array_names(cls) -> list[str]:
        """Return the names of the dataclass fields that contain a statistic."""
        names = [item.name for item in dataclasses.fields(cls)]
        return [name for name in names if name not in ("initial_times", "num_members")]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return statistic name -> values of the statistic, (N, L, ...)."""
        return {name: getattr(self, name) for name in self.array_names()}

    def case_means(self) -> dict[str, np.ndarray]:
        """Return statistic name -> mean over all cases, (L, X, R), for each statistic of `resampled`."""
        return {name: values.mean(axis=0) for name, values in self.resampled().items()}

    def resampled(self) -> dict[str, np.ndarray]:
        """Return statistic name -> values (N, L, X, R), for each statistic that the bootstrap resamples."""
        return self.arrays()

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric name -> values of the metric over all cases, (L, X, R)."""
        return self.metrics_from_means(self.case_means())

    def metrics_from_means(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return metric name -> values; `means` is statistic name -> mean over cases, such as from `case_means`."""
        raise NotImplementedError

    def contributions(
        self, cases: Mapping[str, np.ndarray], means: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return metric name -> (N, X, R), the contribution of each case to the metric at one lead time.

        To first order, the metric is a linear function of the mean of the contributions over cases.

        Args:
            cases: name of each statistic of `resampled` -> values at the lead time, (N, X, R).
            means: name of each statistic of `resampled` -> means of these values over cases, (X, R).
            metrics: result of `metrics_from_means` for `means`.
        """
        raise NotImplementedError


@dataclass
class DeterministicStatistics(CaseStatistics):
    """Area means of one forecast, or of an ensemble mean, for each case and lead time; each (N, L, X, R).

    The X rows are the channels, then the wind vectors. Squares and products of vectors are sums over both components.

    Attributes:
        error: forecast minus truth, in the units of the channel; for a vector, the error of the wind speed.
        absolute_error: absolute error, in the units of the channel; for a vector, the length of the error vector.
        squared_error: squared error; this statistic and all following statistics are in squared units.
        forecast_variance: squared anomaly (difference from the climatology) of the forecast.
        truth_variance: squared anomaly of the truth.
        covariance: product of the anomalies of forecast and truth.
        forecast_activity: variance of the forecast's anomaly about its area mean.
        truth_activity: variance of the truth's anomaly about its area mean.
    """

    error: np.ndarray
    absolute_error: np.ndarray
    squared_error: np.ndarray
    forecast_variance: np.ndarray
    truth_variance: np.ndarray
    covariance: np.ndarray
    forecast_activity: np.ndarray
    truth_activity: np.ndarray

    @classmethod
    def empty(cls, initial_times: np.ndarray, num_leads: int, area_mean: AreaMean, num_members: int = 1) -> Self:
        """Return new statistics of the cases with these initial times, (N,) in minutes; all values are NaN."""
        shape = len(initial_times), num_leads, *area_mean.shape
        arrays = {name: np.full(shape, np.nan) for name in cls.array_names()}
        return cls(np.asarray(initial_times, dtype=np.int64), **arrays, num_members=num_members)

    def add(
        self, case: int, lead: int, area_mean: AreaMean, forecast: np.ndarray, reference: ReferenceFields,
        description: str = "forecast",
    ) -> None:  # fmt: skip
        """Add the errors of one case at one lead time, computed from the fields of forecast, truth and climatology.

        Args:
            case: index of the case.
            lead: index of the lead time.
            area_mean: area means of the C channels.
            forecast: (C, H, W) or (C, P) fields; masked cells may contain any value.
            reference: truth and climatology at the valid time; their fields have the same shape.
            description: description of the forecast for error messages.

        Raises:
            DataError: if a value is not finite in a cell that is not masked.
        """
        moments = compute_error_moments(area_mean, reference, {description: forecast})
        self.add_moments(case, lead, area_mean, moments[description])

    def add_moments(self, case: int, lead: int, area_mean: AreaMean, moments: ErrorMoments) -> None:
        """Add the error moments of one case at one lead time.

        Args:
            case: index of the case.
            lead: index of the lead time.
            area_mean: area means of the C channels.
            moments: error moments of the forecast.
        """
        index = case, lead
        self.error[index] = np.concatenate([moments.error, moments.speed_error])
        self.absolute_error[index] = np.concatenate([moments.absolute_error, moments.vector_error_length])
        self.squared_error[index] = area_mean.append_vectors(moments.squared_error)
        self.forecast_variance[index] = area_mean.append_vectors(moments.forecast_variance)
        self.truth_variance[index] = area_mean.append_vectors(moments.truth_variance)
        self.covariance[index] = area_mean.append_vectors(moments.covariance)
        # The variance about the area mean is the mean square minus the squared mean; rounding may make it negative.
        forecast_anomaly = moments.truth_anomaly + moments.error
        forecast_activity = np.maximum(moments.forecast_variance - forecast_anomaly**2, 0.0)
        truth_activity = np.maximum(moments.truth_variance - moments.truth_anomaly**2, 0.0)
        self.forecast_activity[index] = area_mean.append_vectors(forecast_activity)
        self.truth_activity[index] = area_mean.append_vectors(truth_activity)

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric name -> (L, X, R): the metrics of `metrics_from_means`, ``acc_wb2`` and the activities.

        ``acc_wb2`` is the mean over cases of their anomaly correlations (WeatherBench 2, Rasp et al. 2024, eq. 6).
        ``activity`` and ``activity_truth`` are the spatial standard deviations of the anomalies of forecast and truth;
        variances are averaged over cases before the root. ``activity_ratio`` is ``activity`` / ``activity_truth``.
        """
        means = self.case_means()
        correlation = _compute_correlation(self.covariance, self.forecast_variance * self.truth_variance)
        activity = np.sqrt(means["forecast_activity"])
        truth_activity = np.sqrt(means["truth_activity"])
        with np.errstate(invalid="ignore", divide="ignore"):
            activity_ratio = np.where(truth_activity > 0, activity / truth_activity, np.nan)
        return {
            **self.metrics_from_means(means),
            "acc_wb2": correlation.mean(axis=0),
            "activity": activity,
            "activity_truth": truth_activity,
            "activity_ratio": activity_ratio,
        }

    def metrics_from_means(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return metric name -> values with the shape of the means; see the base class.

        - ``rmse``, ``bias``, ``mae``: root of the mean squared error, mean error, mean absolute error.
        - ``acc``: anomaly correlation over all cases together, without subtraction of the mean anomaly.
        - ``crps``: CRPS of a single forecast, which is its mean absolute error; for a vector, the energy score.
        """
        return {
            "rmse": np.sqrt(means["squared_error"]),
            "bias": means["error"],
            "mae": means["absolute_error"],
            "acc": _compute_correlation(means["covariance"], means["forecast_variance"] * means["truth_variance"]),
            "crps": means["absolute_error"],
        }

    def crps_of_cases(self) -> np.ndarray:
        """Return the CRPS of each case, (N, L, X, R); for a single forecast, it is the absolute error."""
        return self.absolute_error

    def crps_fair_of_cases(self) -> np.ndarray:
        """Return the fair CRPS of each case, (N, L, X, R); it is NaN because it is not defined for one member."""
        return np.full_like(self.absolute_error, np.nan)

    def contributions(
        self, cases: Mapping[str, np.ndarray], means: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the contribution of each case to the metrics with intervals; see `CaseStatistics.contributions`."""
        with np.errstate(invalid="ignore", divide="ignore"):
            product = cases["covariance"] / np.sqrt(means["forecast_variance"] * means["truth_variance"])
            forecast_variance = cases["forecast_variance"] / means["forecast_variance"]
            truth_variance = cases["truth_variance"] / means["truth_variance"]
            # The derivative of covariance / sqrt(forecast variance x truth variance).
            correlation = product - metrics["acc"] / 2 * (forecast_variance + truth_variance)
        # Factors that are equal for all cases are left out; they do not change correlations between blocks.
        return {
            "rmse": cases["squared_error"],
            "bias": cases["error"],
            "mae": cases["absolute_error"],
            "acc": correlation,
            "crps": cases["absolute_error"],
        }


@dataclass
class EnsembleStatistics(DeterministicStatistics):
    """Statistics of an ensemble mean, and area means of the spread and CRPS of its members; each (N, L, X, R).

    Attributes:
        variance: unbiased variance over members, in squared units; for a vector, the sum over both components.
        crps: standard CRPS (`credit.verify.statistics.ensemble_kernels`); for a vector, the energy score.
        crps_fair: fair CRPS, in the units of the channel like `crps`; for a vector, the fair energy score.
    """

    variance: np.ndarray
    crps: np.ndarray
    crps_fair: np.ndarray

    def crps_of_cases(self) -> np.ndarray:
        """Return the CRPS of each case, (N, L, X, R)."""
        return self.crps

    def crps_fair_of_cases(self) -> np.ndarray:
        """Return the fair CRPS of each case, (N, L, X, R)."""
        return self.crps_fair

    def add_members(
        self, case: int, lead: int, area_mean: AreaMean, members_MCP: np.ndarray, truth_CP: np.ndarray, description: str
    ) -> np.ndarray:
        """Add spread and CRPS of the members for one case at one lead time; `add` adds errors of the ensemble mean.

        If the members are not contiguous in memory, each thread copies one channel or wind vector at a time.

        Args:
            case: index of the case.
            lead: index of the lead time.
            area_mean: area means of the C channels.
            members_MCP: fields of the members; masked cells may contain any value.
            truth_CP: fields of the truth; masked cells may contain any value.
            description: name and time of the forecast for error messages.

        Returns:
            (C, R, M + 1) area fraction in which the truth has each rank among the members, for `RankHistogram`.

        Raises:
            DataError: if a value is not finite in a cell that is not masked, or if the number of members is wrong.
        """
        num_members = len(members_MCP)
        if num_members != self.num_members:
            raise DataError(f"{description}: has {num_members} members, all cases must have {self.num_members}")
        fields = {}
        for number, member_CP in enumerate(members_MCP):
            fields[f"{description}, member {number}"] = member_CP

        def sum_vector(members: np.ndarray, index: tuple[int, int], pair: np.ndarray, out: np.ndarray) -> None:
            # The wind components have the channel indices `index` in `members` and `pair` in the truth.
            truth = [area_mean.channel_values(truth_CP, channel) for channel in pair]
            valid = area_mean.valid_CP[pair[0]]
            vector_member_sums(members, index, *truth, valid, choose_wind_scale(truth), area_mean.segments, out)
            # Squares of very large or very small winds overflow in float32; such winds are summed again in float64.
            if not np.isfinite(out).all():
                members = members[:, list(index)].astype(np.float64)
                truth = [component.astype(np.float64) for component in truth]
                vector_member_sums(members, (0, 1), *truth, valid, choose_wind_scale(truth), area_mean.segments, out)

        def sum_group(channels: np.ndarray, channel_sums: np.ndarray, vector_sums: np.ndarray) -> None:
            pair = channels.tolist()
            for channel, out in zip(pair, channel_sums, strict=True):
                # If `members` is a copy of only this channel, the index of the channel in the copy is 0.
                members, (index,) = _make_contiguous(members_MCP, [channel])
                member_sums(members, index, truth_CP[channel], area_mean.valid_CP[channel], area_mean.segments, out)
            if len(vector_sums):
                members, index = _make_contiguous(members_MCP, pair)
                sum_vector(members, index, pair, vector_sums)

        # A channel also has a sum for each of the M + 1 ranks. A vector has a sum of errors and a sum of distances.
        counts = NUM_MEMBER_SUMS + 1 + num_members, 2
        channel_means, vector_means = area_mean.reduce_channels_and_winds(counts, sum_group, fields)
        crps, crps_fair = crps_from_sums(channel_means, num_members)
        energy_score, energy_score_fair = crps_from_sums(vector_means, num_members)
        self.crps[case, lead] = np.concatenate([crps, energy_score])
        self.crps_fair[case, lead] = np.concatenate([crps_fair, energy_score_fair])
        # Row 2 of the sums is the variance over members; the rows from `NUM_MEMBER_SUMS` on are the ranks.
        self.variance[case, lead] = area_mean.append_vectors(channel_means[2])
        return np.moveaxis(channel_means[NUM_MEMBER_SUMS:], 0, -1)

    def metrics_from_means(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the metrics of the ensemble mean (`DeterministicStatistics`) and the metrics of the members.

        - ``crps``, ``crps_fair``: see `credit.verify.statistics.ensemble_kernels`.
        - ``spread``: root of the mean variance over members.
        - ``spread_skill``: sqrt((M + 1) / M) spread / rmse; 1 for an ensemble that is statistically consistent with the
          truth, below 1 for an ensemble with too little spread (Fortin et al. 2014, doi:10.1175/JHM-D-14-0008.1).
        - ``rmse_member``: root of the squared error of a member, averaged over members.

        Derivation of ``spread_skill``: let truth and members be independent samples of a distribution with variance V.
        The expected squared error of the ensemble mean is then V (M + 1) / M, and the expected unbiased variance over
        members is V. Both are linear in V, so these equations also apply to means over cells and cases (before roots).
        The mean squared error of members is the squared error of the ensemble mean plus (M - 1) / M of this variance.
        """
        squared = means["squared_error"]
        variance = means["variance"]
        with np.errstate(invalid="ignore", divide="ignore"):
            return super().metrics_from_means(means) | {
                "crps": means["crps"],
                "crps_fair": means["crps_fair"],
                "spread": np.sqrt(variance),
                "spread_skill": np.sqrt((self.num_members + 1) / self.num_members * variance / squared),
                "rmse_member": np.sqrt(squared + variance * (self.num_members - 1) / self.num_members),
            }

    def contributions(
        self, cases: Mapping[str, np.ndarray], means: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the contribution of each case to the metrics with intervals; see `CaseStatistics.contributions`."""
        with np.errstate(invalid="ignore", divide="ignore"):
            spread_skill = cases["variance"] / means["variance"] - cases["squared_error"] / means["squared_error"]
        return super().contributions(cases, means, metrics) | {
            "crps": cases["crps"],
            "crps_fair": cases["crps_fair"],
            "spread_skill": spread_skill,
        }


def _make_contiguous(members_MCP: np.ndarray, channels: Sequence[int]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return members (M, ..., P) that are contiguous in memory, and the indices of `channels` in the returned array.

    Contiguous members are returned unchanged, with all channels. Otherwise, only `channels` are copied.
    """
    if members_MCP.flags.c_contiguous:
        return members_MCP, tuple(channels)
    # The kernels are compiled for contiguous arrays.
    copies = np.stack([members_MCP[:, channel] for channel in channels], axis=1)
    return np.ascontiguousarray(copies), tuple(range(len(channels)))


def _compute_correlation(covariance: np.ndarray, variance_product: np.ndarray) -> np.ndarray:
    """Return covariance / sqrt(variance_product), NaN where `variance_product` is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return covariance / np.sqrt(variance_product)
