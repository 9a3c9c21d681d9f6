"""Score sums: what every score needs of each case, as sums that add up over cases, processes and files.

A metric is a function of the means; mean first, root last. Sums are float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from credit.channels import Channel
from credit.errors import DataError
from credit.grid import LatLonGrid

# WeatherBench 2's: rows at exactly 20 degrees belong to both sides
REGIONS = ("global", "tropics", "extratropics", "extratropics_north", "extratropics_south")
_TROPICS_DEGREES = 20.0


def region_weights(grid: LatLonGrid) -> np.ndarray:
    """Return (R, H, W) area weights of `REGIONS`, float64, each summing to 1; a row belongs by its centre."""
    lat = grid.lat[:, None]
    inside = {
        "global": np.ones_like(lat, dtype=bool),
        "tropics": np.abs(lat) <= _TROPICS_DEGREES,
        "extratropics": np.abs(lat) >= _TROPICS_DEGREES,
        "extratropics_north": lat >= _TROPICS_DEGREES,
        "extratropics_south": lat <= -_TROPICS_DEGREES,
    }
    area = grid.area_weights()
    stacked = np.stack([np.where(inside[name], area, 0.0) for name in REGIONS])
    return stacked / stacked.sum(axis=(1, 2), keepdims=True)


class CellMeans:
    """Area-weighted means over regions, masked cells left out with the weights renormalised.

    Args:
        grid: the grid.
        channels: the C channels that fields have.
        masks: variable -> (H, W) bool, True where missing.
    """

    def __init__(self, grid: LatLonGrid, channels: Sequence[Channel], masks: Mapping[str, np.ndarray]) -> None:
        self._channels = channels
        everywhere = np.ones(grid.shape, dtype=bool)
        valid = [~masks[c.variable] if c.variable in masks else everywhere for c in channels]
        self.valid_CN = np.stack(valid).reshape(len(channels), -1)
        self._weights_NR = region_weights(grid).reshape(len(REGIONS), -1).T
        self._norm_CR = self.valid_CN @ self._weights_NR

    def flatten(self, fields_CHW: np.ndarray, what: str) -> np.ndarray:
        """Return (C, N) float64 with masked cells set to 0.

        Raises:
            DataError: if a value outside the mask is missing: `what` names the forecast and its time. A forecast that
                blew up must not pass for one with fewer cells.
        """
        flat = np.where(self.valid_CN, fields_CHW.reshape(self.valid_CN.shape), 0.0).astype(np.float64)
        if not np.isfinite(flat).all():
            channel = self._channels[int(np.flatnonzero(~np.isfinite(flat).all(axis=1))[0])]
            raise DataError(f"{what}: {channel.name} is not finite outside its mask")
        return flat

    def mean(self, values_CN: np.ndarray) -> np.ndarray:
        """Return the means over each region, (C, R); `values_CN` must be 0 where masked."""
        with np.errstate(invalid="ignore"):  # a region without a valid cell has no mean
            return (values_CN @ self._weights_NR) / self._norm_CR


@dataclass
class ScoreSums:
    """Sums over cases of one forecast, each (L, C, R) float64.

    Attributes:
        cases: number of cases.
        error: forecast minus truth.
        absolute: its absolute value.
        squared: its square.
        forecast_variance: square of the forecast's anomaly to the climatology.
        truth_variance: square of the truth's anomaly.
        covariance: product of the two anomalies.
        correlation: ratio of that product to the root of the squares, case by case.
    """

    cases: int
    error: np.ndarray
    absolute: np.ndarray
    squared: np.ndarray
    forecast_variance: np.ndarray
    truth_variance: np.ndarray
    covariance: np.ndarray
    correlation: np.ndarray

    @classmethod
    def zeros(cls, leads: int, channels: int) -> ScoreSums:
        """Return empty sums."""
        return cls(0, *(np.zeros((leads, channels, len(REGIONS))) for _ in fields(cls)[1:]))

    def add(self, lead: int, means: CellMeans, forecast: np.ndarray, truth: np.ndarray, normal: np.ndarray) -> None:
        """Add one field; all are (C, N) from `CellMeans.flatten`, `normal` is the climatology at the valid time."""
        error, anomaly, true_anomaly = forecast - truth, forecast - normal, truth - normal
        self.error[lead] += means.mean(error)
        self.absolute[lead] += means.mean(np.abs(error))
        self.squared[lead] += means.mean(error**2)
        own, true = means.mean(anomaly**2), means.mean(true_anomaly**2)
        product = means.mean(anomaly * true_anomaly)
        self.forecast_variance[lead] += own
        self.truth_variance[lead] += true
        self.covariance[lead] += product
        self.correlation[lead] += _ratio(product, own * true)

    def __add__(self, other: ScoreSums) -> ScoreSums:
        return ScoreSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric -> (L, C, R).

        ``rmse`` is the root of the mean over cases; ``acc`` the anomaly correlation of all cases pooled, without
        subtracting the mean anomaly; ``acc_wb2`` the mean of each case's (WeatherBench 2, Rasp et al. 2024, eq. 6).
        """
        return {
            "rmse": np.sqrt(self.squared / self.cases),
            "bias": self.error / self.cases,
            "mae": self.absolute / self.cases,
            "acc": _ratio(self.covariance, self.forecast_variance * self.truth_variance),
            "acc_wb2": self.correlation / self.cases,
        }


def _ratio(covariance: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return covariance / sqrt(squares), NaN where there is no variance."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return covariance / np.sqrt(squares)


def wind_pairs(channels: Sequence[Channel], attributes: Mapping[str, Mapping[str, str]]) -> list[tuple[int, int, str]]:
    """Return (index of u, index of v, name of the pair's variable) of the horizontal winds among `channels`.

    Components belong together by standard_name, level and a name that differs in its first letter only.
    """

    def component(channel: Channel) -> str | None:
        name = attributes.get(channel.variable, {}).get("standard_name", "")
        return {"eastward_wind": "u", "northward_wind": "v"}.get(name)

    northward = {(c.variable[1:], c.level): i for i, c in enumerate(channels) if component(c) == "v"}
    pairs = []
    for index, channel in enumerate(channels):
        partner = northward.get((channel.variable[1:], channel.level))
        if component(channel) == "u" and partner is not None:
            pairs.append((index, partner, f"wind{channel.variable[1:]}"))
    return pairs
