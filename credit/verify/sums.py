"""Score sums: what every score needs of each case, kept case by case.

A metric is a function of the means over cases; mean first, root last. Seasons, resampling and paired tests choose among
the cases without a second pass over the fields. All sums are float64.

Shapes: N cases, L lead times, C channels, V wind vectors, X = C + V rows, R regions, P cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from credit.channels import Channel
from credit.errors import DataError


class CellMeans:
    """Area-weighted means over regions, masked cells left out with the weights renormalised.

    Args:
        channels: the C channels that fields have.
        masks: variable -> (H, W) bool, True where missing.
        weights: (R, H, W) from `credit.verify.regions.region_weights`.
        winds: (index of u, index of v) of V wind vectors among the channels, whose masks are equal.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        masks: Mapping[str, np.ndarray],
        weights: np.ndarray,
        winds: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._channels = channels
        everywhere = np.ones(weights.shape[1:], dtype=bool)
        valid = [~masks[c.variable] if c.variable in masks else everywhere for c in channels]
        self.valid_CP = np.stack(valid).reshape(len(channels), -1)
        self.u, self.v = (np.array([pair[i] for pair in winds], dtype=int) for i in (0, 1))
        self._weights_PR = weights.reshape(len(weights), -1).T
        self._norm_CR = self.valid_CP @ self._weights_PR
        self.shape = len(channels) + len(winds), len(weights)

    def flatten(self, fields_CHW: np.ndarray, what: str) -> np.ndarray:
        """Return (C, P) float64 with masked cells set to 0.

        Raises:
            DataError: if a value outside the mask is missing: `what` names the forecast and its time. A forecast that
                blew up must not pass for one with fewer cells.
        """
        flat = np.where(self.valid_CP, fields_CHW.reshape(self.valid_CP.shape), 0.0).astype(np.float64)
        if not np.isfinite(flat).all():
            channel = self._channels[int(np.flatnonzero(~np.isfinite(flat).all(axis=1))[0])]
            raise DataError(f"{what}: {channel.name} is not finite outside its mask")
        return flat

    def mean(self, values_CP: np.ndarray) -> np.ndarray:
        """Return the means over each region, (C, R); `values_CP` must be 0 where masked."""
        with np.errstate(invalid="ignore"):  # a region without a valid cell has no mean
            return (values_CP @ self._weights_PR) / self._norm_CR

    def vector_mean(self, values_VP: np.ndarray) -> np.ndarray:
        """Return the means over each region of what belongs to the vectors, (V, R)."""
        with np.errstate(invalid="ignore"):
            return (values_VP @ self._weights_PR) / self._norm_CR[self.u]

    def with_vectors(self, means_CR: np.ndarray) -> np.ndarray:
        """Return (X, R): the channels' means, then for each vector the sum of its components'."""
        return np.concatenate([means_CR, means_CR[self.u] + means_CR[self.v]])


@dataclass
class ScoreSums:
    """Area means of each case of one forecast, each (N, L, X, R) float64 beside the initial times.

    The rows are the channels, then the wind vectors, whose squares and products are sums over both components.

    Attributes:
        initial: (N,) initial times in minutes, increasing.
        error: forecast minus truth; of a vector: of its length.
        absolute: the absolute error; of a vector: the length of the vector error.
        squared: the squared error.
        forecast_variance: square of the forecast's anomaly to the climatology.
        truth_variance: square of the truth's anomaly.
        covariance: product of the two anomalies.
        forecast_activity: variance of the forecast's anomaly about its area mean.
        truth_activity: that of the truth's.
    """

    initial: np.ndarray
    error: np.ndarray
    absolute: np.ndarray
    squared: np.ndarray
    forecast_variance: np.ndarray
    truth_variance: np.ndarray
    covariance: np.ndarray
    forecast_activity: np.ndarray
    truth_activity: np.ndarray

    @classmethod
    def empty(cls, initial: np.ndarray, leads: int, means: CellMeans) -> ScoreSums:
        """Return room for the cases that start at `initial`; NaN until they are added."""
        shape = len(initial), leads, *means.shape
        return cls(np.asarray(initial, dtype=np.int64), *(np.full(shape, np.nan) for _ in PLANES))

    def add(
        self, case: int, lead: int, means: CellMeans, forecast: np.ndarray, truth: np.ndarray, normal: np.ndarray
    ) -> None:
        """Enter one field; all are (C, P) from `CellMeans.flatten`, `normal` is the climatology at the valid time."""
        error, anomaly, true_anomaly = forecast - truth, forecast - normal, truth - normal
        place, u, v = (case, lead), means.u, means.v
        mean_error, true_mean = means.mean(error), means.mean(true_anomaly)
        longer = np.hypot(forecast[u], forecast[v]) - np.hypot(truth[u], truth[v])
        self.error[place] = np.concatenate([mean_error, means.vector_mean(longer)])
        length = np.hypot(error[u], error[v])
        self.absolute[place] = np.concatenate([means.mean(np.abs(error)), means.vector_mean(length)])
        self.squared[place] = means.with_vectors(means.mean(error**2))
        own, true = means.mean(anomaly**2), means.mean(true_anomaly**2)
        self.forecast_variance[place] = means.with_vectors(own)
        self.truth_variance[place] = means.with_vectors(true)
        self.covariance[place] = means.with_vectors(means.mean(anomaly * true_anomaly))
        # rounding may leave a little less than nothing
        self.forecast_activity[place] = means.with_vectors(np.maximum(own - (true_mean + mean_error) ** 2, 0.0))
        self.truth_activity[place] = means.with_vectors(np.maximum(true - true_mean**2, 0.0))

    @classmethod
    def join(cls, parts: Sequence[ScoreSums]) -> ScoreSums:
        """Return the cases of all parts in the order of their times, whatever the order of the parts.

        Raises:
            DataError: if two parts have the same case.
        """
        initial = np.concatenate([part.initial for part in parts])
        order = np.argsort(initial)
        if (np.diff(initial[order]) == 0).any():
            raise DataError("scores of two parts cannot be joined: they have an initial time in common")
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts])[order] for f in fields(cls)))

    def select(self, cases: np.ndarray) -> ScoreSums:
        """Return the chosen cases; `cases` is (N,) bool."""
        return ScoreSums(*(getattr(self, f.name)[cases] for f in fields(self)))

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric -> (L, X, R): those of `metrics_of`, and ``acc_wb2`` and the activities.

        ``acc_wb2`` is the mean of each case's correlation (WeatherBench 2, Rasp et al. 2024, eq. 6). ``activity`` is
        the standard deviation in space of the forecast's anomaly, ``activity_truth`` that of the truth's; the mean over
        cases is taken of the variance.
        """
        means = {name: getattr(self, name).mean(axis=0) for name in PLANES}
        each = _ratio(self.covariance, self.forecast_variance * self.truth_variance)
        activity, truth = (np.sqrt(means[name]) for name in ("forecast_activity", "truth_activity"))
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                **metrics_of(means),
                "acc_wb2": each.mean(axis=0),
                "activity": activity,
                "activity_truth": truth,
                "activity_ratio": np.where(truth > 0, activity / truth, np.nan),
            }


PLANES = tuple(field.name for field in fields(ScoreSums) if field.name != "initial")


def metrics_of(means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return metric -> values, of means over cases of any shape by the names of `ScoreSums`.

    ``rmse`` is the root of the mean over cases; ``acc`` the anomaly correlation of all cases pooled, without
    subtracting the mean anomaly.
    """
    return {
        "rmse": np.sqrt(means["squared"]),
        "bias": means["error"],
        "mae": means["absolute"],
        "acc": _ratio(means["covariance"], means["forecast_variance"] * means["truth_variance"]),
    }


def _ratio(covariance: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return covariance / sqrt(squares), NaN where there is no variance."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return covariance / np.sqrt(squares)


def wind_pairs(
    channels: Sequence[Channel], attributes: Mapping[str, Mapping[str, str]], masks: Mapping[str, np.ndarray]
) -> list[tuple[int, int, str]]:
    """Return (index of u, index of v, name of the pair's variable) of the horizontal winds among `channels`.

    Components belong together by standard_name, level, mask and a name that differs in its first letter only.
    """

    def component(channel: Channel) -> str | None:
        name = attributes.get(channel.variable, {}).get("standard_name", "")
        return {"eastward_wind": "u", "northward_wind": "v"}.get(name)

    northward = {(c.variable[1:], c.level): i for i, c in enumerate(channels) if component(c) == "v"}
    pairs = []
    for index, channel in enumerate(channels):
        partner = northward.get((channel.variable[1:], channel.level))
        if component(channel) != "u" or partner is None:
            continue
        if np.array_equal(masks.get(channel.variable), masks.get(channels[partner].variable)):
            pairs.append((index, partner, f"wind{channel.variable[1:]}"))
    return pairs
