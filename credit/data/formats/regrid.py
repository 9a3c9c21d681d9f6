"""Regridder: brings fields from one global latitude-longitude grid to another.

On such grids each method is a weighted mean over rows, then one over columns: two matrices with few entries a row.

- ``bilinear``: linear in latitude and, periodically, in longitude. Where the source has no row on a pole, one is made
  of its last row: the mean or, for a component of a vector, zonal wavenumber 1, which is what one vector at the pole
  looks like in components along all meridians.
- ``conservative``: the mean over the source cells that a target cell covers, by covered area (first order; P. W. Jones,
  Mon. Wea. Rev. 127, 2204 (1999)); the global mean is kept.
- ``nearest``: the value of the nearest row and column, the first in the grid's order of two equally near ones.

Letters of shapes: h, w are the source's rows and columns, H, W the target's; K is the most source rows (columns) that
one target row (column) is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from credit.grid import LatLonGrid

# weights below are rounding of the edges
_NEGLIGIBLE = 1e-9
# half, less rounding: a cell that is covered by exactly half is not missing
_LEAST_VALID = 0.5 - 1e-5
_AT_POLE_DEGREES = 1e-3


@dataclass(frozen=True)
class _SparseMatrix:
    """The entries of a matrix with few of them a row.

    Attributes:
        columns: (rows, K) where they are.
        weights: (rows, K) float32; each row adds up to 1.
    """

    columns: np.ndarray
    weights: np.ndarray

    @classmethod
    def from_dense(cls, matrix: np.ndarray) -> _SparseMatrix:
        kept = matrix / matrix.sum(axis=1, keepdims=True)
        kept[kept < _NEGLIGIBLE] = 0.0
        most = int((kept > 0).sum(axis=1).max())
        columns = np.sort(np.argsort(-kept, axis=1, kind="stable")[:, :most], axis=1)
        return cls(columns, np.take_along_axis(kept, columns, axis=1).astype(np.float32))

    def times(self, fields: np.ndarray, axis: int) -> np.ndarray:
        """Return the product with `fields` along `axis`, -2 or -1."""
        weights_KN = np.ascontiguousarray(self.weights.T)[..., None] if axis == -2 else self.weights.T
        total = weights_KN[0] * fields.take(self.columns[:, 0], axis=axis)
        for number in range(1, len(weights_KN)):
            total += weights_KN[number] * fields.take(self.columns[:, number], axis=axis)
        return total


class Regridder:
    """Brings fields from one grid to another.

    A missing value has the weight 0, and what is left of the weights is scaled up to 1. A target cell is missing where
    less than half of its weight is left.

    Args:
        source: the grid of the fields.
        target: the grid to bring them to.
        method: see the module.
        vector: the fields are a component of a vector, which changes sign across a pole.
    """

    def __init__(
        self,
        source: LatLonGrid,
        target: LatLonGrid,
        method: Literal["bilinear", "conservative", "nearest"],
        vector: bool = False,
    ) -> None:
        self._add_north = self._add_south = False
        if method == "conservative":
            rows = _overlaps(-np.sin(np.deg2rad(target.lat_bounds)), -np.sin(np.deg2rad(source.lat_bounds)))
            columns = sum(_overlaps(_edges(target.lon), _edges(source.lon) + turn) for turn in (-360.0, 0.0, 360.0))
        elif method == "bilinear":
            self._add_north, self._add_south = (bool(90.0 - abs(source.lat[end]) > _AT_POLE_DEGREES) for end in (0, -1))
            lat = np.concatenate([[90.0] * self._add_north, source.lat, [-90.0] * self._add_south])
            rows, columns = _linear(-target.lat, -lat), _linear_round(target.lon, source.lon)
        else:
            gap = np.abs(target.lon[:, None] - source.lon)
            columns = _nearest(np.minimum(gap, 360.0 - gap))
            rows = _nearest(np.abs(target.lat[:, None] - source.lat))
        self._rows, self._columns = _SparseMatrix.from_dense(rows), _SparseMatrix.from_dense(columns)
        # orthonormal functions of longitude that a row on a pole may consist of
        angle = np.deg2rad(source.lon)
        wave = np.stack([np.cos(angle), np.sin(angle)]) * np.sqrt(2.0) if vector else np.ones((1, len(angle)))
        self._pole_waves = (wave / np.sqrt(len(angle))).astype(np.float32)
        self._pole_mean = np.full((1, len(angle)), len(angle) ** -0.5, dtype=np.float32)

    def apply(self, fields: np.ndarray) -> np.ndarray:
        """Return fields (..., h, w) on the target grid, (..., H, W) float32; missing values are NaN in both."""
        fields = np.asarray(fields, dtype=np.float32)
        missing = np.isnan(fields)
        if not missing.any():
            return self._mean(fields, self._pole_waves)
        total = self._mean(np.where(missing, np.float32(0.0), fields), self._pole_waves)
        valid = self._mean((~missing).astype(np.float32), self._pole_mean)
        return np.divide(total, valid, out=np.full_like(total, np.nan), where=valid >= _LEAST_VALID)

    def _mean(self, fields: np.ndarray, pole: np.ndarray) -> np.ndarray:
        parts = [fields]
        if self._add_north:
            parts.insert(0, fields[..., :1, :] @ pole.T @ pole)
        if self._add_south:
            parts.append(fields[..., -1:, :] @ pole.T @ pole)
        if len(parts) > 1:
            fields = np.concatenate(parts, axis=-2)
        # infinite values become infinite or missing ones, which the reader refuses
        with np.errstate(invalid="ignore"):
            return self._columns.times(self._rows.times(fields, axis=-2), axis=-1)


def _overlaps(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return how much of each interval of `target` lies in each of `source`; both are ascending edges."""
    upper = np.minimum(target[1:, None], source[1:])
    lower = np.maximum(target[:-1, None], source[:-1])
    return np.maximum(upper - lower, 0.0)


def _edges(lon: np.ndarray) -> np.ndarray:
    """Return the W + 1 edges of columns, half way between their centres, ascending over 360 degrees."""
    inner = 0.5 * (lon[1:] + lon[:-1])
    west = 0.5 * (lon[0] + lon[-1] - 360.0)
    return np.concatenate([[west], inner, [west + 360.0]])


def _linear(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return the matrix of linear interpolation between ascending places; beyond the ends the last value holds."""
    after = np.clip(np.searchsorted(source, target, side="right"), 1, len(source) - 1)
    share = np.clip((target - source[after - 1]) / (source[after] - source[after - 1]), 0.0, 1.0)
    matrix = np.zeros((len(target), len(source)))
    matrix[np.arange(len(target)), after - 1] = 1.0 - share
    matrix[np.arange(len(target)), after] = share
    return matrix


def _linear_round(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return the matrix of linear interpolation along a circle."""
    around = _linear(target, np.concatenate([[source[-1] - 360.0], source, [source[0] + 360.0]]))
    matrix = around[:, 1:-1]
    matrix[:, -1] += around[:, 0]
    matrix[:, 0] += around[:, -1]
    return matrix


def _nearest(distance: np.ndarray) -> np.ndarray:
    """Return the matrix that takes the nearest, from distances (target, source)."""
    matrix = np.zeros_like(distance)
    # of equally near ones the first, whatever rounding says
    matrix[np.arange(len(distance)), np.round(distance, 6).argmin(axis=1)] = 1.0
    return matrix
