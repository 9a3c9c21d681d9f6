"""Regridding from one global latitude-longitude grid to another.

Each method is a weighted mean over rows, followed by one over columns: two sparse matrices.

- ``bilinear``: linear in latitude and, periodically, in longitude. If the source has no row on a pole, one is computed
  from its last row: the mean or, for a component of a vector, zonal wavenumber 1, because the components of one vector
  at the pole along all meridians have this shape.
- ``conservative``: the mean over the source cells that a target cell covers, by covered area (first order; P. W. Jones,
  Mon. Wea. Rev. 127, 2204 (1999)); the global mean is preserved.
- ``nearest``: the value of the nearest row and column; of two equally near ones, the first in the order of the grid.

Letters of shapes: h, w are rows and columns of the source, H, W those of the target; K is the greatest number of source
rows (columns) that contribute to one target row (column).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from credit.grid import LatLonGrid

# Smaller weights are rounding errors of the edges.
_NEGLIGIBLE = 1e-9
# One half less rounding errors: a cell of which exactly half is covered is not missing.
_LEAST_VALID = 0.5 - 1e-5
# A row nearer to a pole than this lies on the pole.
_AT_POLE_DEGREES = 1e-3


@dataclass(frozen=True)
class _SparseMatrix:
    """Sparse matrix with at most K entries a row.

    Attributes:
        columns: (rows, K) int64 column of each entry.
        weights: (rows, K) float32 values of the entries; each row adds up to 1.
    """

    columns: np.ndarray
    weights: np.ndarray

    @classmethod
    def from_dense(cls, matrix: np.ndarray) -> _SparseMatrix:
        """Return a matrix (rows, columns) of weights of at least 0, with each row scaled to add up to 1."""
        weights = matrix / matrix.sum(axis=1, keepdims=True)
        weights[weights < _NEGLIGIBLE] = 0.0
        max_entries = int((weights > 0).sum(axis=1).max())
        # Rows with fewer entries are filled up with zeros. In increasing order columns are read fastest.
        columns = np.sort(np.argsort(-weights, axis=1, kind="stable")[:, :max_entries], axis=1)
        return cls(columns, np.take_along_axis(weights, columns, axis=1).astype(np.float32))

    def multiply(self, fields: np.ndarray, axis: int) -> np.ndarray:
        """Return the product with fields along one axis, which then has the length `rows`; float32.

        Args:
            fields: (..., h, w) float32.
            axis: -2 or -1.
        """
        weights_KN = self.weights.T
        if axis == -2:
            weights_KN = np.ascontiguousarray(weights_KN)[..., None]
        # The k-th entries of all rows are added at once.
        total = weights_KN[0] * fields.take(self.columns[:, 0], axis=axis)
        for k in range(1, len(weights_KN)):
            total += weights_KN[k] * fields.take(self.columns[:, k], axis=axis)
        return total


class Regridder:
    """Interpolation of fields from one grid to another.

    A missing value has the weight 0, and the remaining weights are scaled to add up to 1. A target cell is missing if
    less than half of its weight remains.

    Args:
        source: grid of the fields.
        target: grid to interpolate to.
        method: ``bilinear``, ``conservative`` or ``nearest``, see the module.
        vector: True if the fields are a component of a vector, which changes sign across a pole.
    """

    def __init__(
        self,
        source: LatLonGrid,
        target: LatLonGrid,
        method: Literal["bilinear", "conservative", "nearest"],
        vector: bool = False,
    ) -> None:
        # Dense matrices of the weights, (H, h) for rows and (W, w) for columns. Only `bilinear` adds rows on the poles.
        self._add_north = False
        self._add_south = False
        if method == "conservative":
            # The area between two latitudes is proportional to the difference of their sines.
            rows = _overlaps(-np.sin(np.deg2rad(target.lat_bounds)), -np.sin(np.deg2rad(source.lat_bounds)))
            # A target cell can overlap source cells one turn further west or east.
            columns = np.zeros((len(target.lon), len(source.lon)))
            for turn in (-360.0, 0.0, 360.0):
                columns += _overlaps(_edges(target.lon), _edges(source.lon) + turn)
        elif method == "bilinear":
            self._add_north = bool(90.0 - abs(source.lat[0]) > _AT_POLE_DEGREES)
            self._add_south = bool(90.0 - abs(source.lat[-1]) > _AT_POLE_DEGREES)
            lat = np.concatenate([[90.0] * self._add_north, source.lat, [-90.0] * self._add_south])
            # Latitudes descend, and the interpolation needs ascending coordinates.
            rows = _linear_matrix(-target.lat, -lat)
            columns = _periodic_matrix(target.lon, source.lon)
        else:
            # Distances in longitude are measured along the shorter way round the globe.
            distance = np.abs(target.lon[:, None] - source.lon)
            columns = _nearest_matrix(np.minimum(distance, 360.0 - distance))
            rows = _nearest_matrix(np.abs(target.lat[:, None] - source.lat))
        self._rows = _SparseMatrix.from_dense(rows)
        self._columns = _SparseMatrix.from_dense(columns)
        # Orthonormal functions of longitude onto which the last row is projected for a row on the pole.
        angle = np.deg2rad(source.lon)
        wave = np.ones((1, len(angle)))
        if vector:
            wave = np.stack([np.cos(angle), np.sin(angle)]) * np.sqrt(2.0)
        self._pole_waves = (wave / np.sqrt(len(angle))).astype(np.float32)
        self._pole_mean = np.full((1, len(angle)), len(angle) ** -0.5, dtype=np.float32)

    def apply(self, fields: np.ndarray) -> np.ndarray:
        """Return fields (..., h, w) on the target grid, (..., H, W) float32; missing values are NaN in both."""
        fields = np.asarray(fields, dtype=np.float32)
        missing = np.isnan(fields)
        if not missing.any():
            return self._average(fields, self._pole_waves)
        # The mean of the valid values is the mean with zeros instead of missing values over the valid weight.
        total = self._average(np.where(missing, np.float32(0.0), fields), self._pole_waves)
        valid = self._average((~missing).astype(np.float32), self._pole_mean)
        return np.divide(total, valid, out=np.full_like(total, np.nan), where=valid >= _LEAST_VALID)

    def _average(self, fields: np.ndarray, pole_functions: np.ndarray) -> np.ndarray:
        """Return the weighted means (..., H, W) of fields without missing values, with the rows on the poles added.

        Args:
            fields: (..., h, w) float32.
            pole_functions: (functions, w) orthonormal functions onto which the last row is projected.
        """
        rows = [fields]
        if self._add_north:
            rows.insert(0, fields[..., :1, :] @ pole_functions.T @ pole_functions)
        if self._add_south:
            rows.append(fields[..., -1:, :] @ pole_functions.T @ pole_functions)
        if len(rows) > 1:
            fields = np.concatenate(rows, axis=-2)
        # Infinite values become infinite or missing ones, which the reader refuses.
        with np.errstate(invalid="ignore"):
            return self._columns.multiply(self._rows.multiply(fields, axis=-2), axis=-1)


def _overlaps(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return the length that each interval of `target` shares with each of `source`, (targets, sources).

    Both are ascending edges of intervals that follow each other.
    """
    upper = np.minimum(target[1:, None], source[1:])
    lower = np.maximum(target[:-1, None], source[:-1])
    return np.maximum(upper - lower, 0.0)


def _edges(lon: np.ndarray) -> np.ndarray:
    """Return (W + 1,) edges of columns in degrees, half way between their centres (W,), ascending over 360 degrees."""
    inner = 0.5 * (lon[1:] + lon[:-1])
    west = 0.5 * (lon[0] + lon[-1] - 360.0)
    return np.concatenate([[west], inner, [west + 360.0]])


def _linear_matrix(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return the matrix (targets, sources) of linear interpolation between ascending coordinates.

    Beyond the ends of the source the interpolation is constant.
    """
    after = np.clip(np.searchsorted(source, target, side="right"), 1, len(source) - 1)
    before = after - 1
    after_weight = np.clip((target - source[before]) / (source[after] - source[before]), 0.0, 1.0)
    matrix = np.zeros((len(target), len(source)))
    matrix[np.arange(len(target)), before] = 1.0 - after_weight
    matrix[np.arange(len(target)), after] = after_weight
    return matrix


def _periodic_matrix(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return the matrix (targets, sources) of linear interpolation along a circle; coordinates are degrees."""
    extended = np.concatenate([[source[-1] - 360.0], source, [source[0] + 360.0]])
    extended_matrix = _linear_matrix(target, extended)
    # The two added columns are the last and the first of the source.
    matrix = extended_matrix[:, 1:-1]
    matrix[:, -1] += extended_matrix[:, 0]
    matrix[:, 0] += extended_matrix[:, -1]
    return matrix


def _nearest_matrix(distance: np.ndarray) -> np.ndarray:
    """Return the matrix (targets, sources) with 1 at the nearest source row or column of each target, else 0.

    Args:
        distance: (targets, sources) distances in degrees.
    """
    matrix = np.zeros_like(distance)
    # Rounded distances make equally near ones equal, of which argmin takes the first.
    matrix[np.arange(len(distance)), np.round(distance, 6).argmin(axis=1)] = 1.0
    return matrix
