"""Regridding from one global latitude-longitude grid to another.

Each method is a weighted mean over rows, followed by a weighted mean over columns. Both are products with sparse
matrices.

- ``bilinear``: linear in latitude and, periodically, in longitude. If the source has no row on a pole, one is computed
  from the row next to it. For a scalar it is the mean of this row. For a component of a vector it is the part of zonal
  wavenumber 1, because the components of one vector at the pole, seen from all meridians, have this shape.
- ``conservative``: the mean over the source cells that a target cell covers, weighted by the covered area (first order;
  P. W. Jones, Mon. Wea. Rev. 127, 2204 (1999)); the global mean is preserved.
- ``nearest``: the value of the nearest row and column; of two equally near ones, the first in the order of the grid.

Letters of shapes: h and w are the rows and columns of the source grid, H and W those of the target grid. K is the
largest number of source rows (or columns) that contribute to one target row (or column).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from credit.grid import LatLonGrid

# Smaller weights come from rounding errors in the edges of cells, and are set to 0.
_NEGLIGIBLE = 1e-9
# A target cell needs at least half of its weight from valid values. The tolerance keeps a cell with exactly one half.
_LEAST_VALID = 0.5 - 1e-5
# A row nearer to a pole than this lies on the pole.
_AT_POLE_DEGREES = 1e-3


@dataclass(frozen=True)
class _SparseMatrix:
    """Sparse matrix with at most K non-zero entries in each row.

    Attributes:
        columns: (rows, K) int64 column index of each entry.
        weights: (rows, K) float32 value of each entry; rows with fewer entries are filled up with 0. Each row adds up
            to 1.
    """

    columns: np.ndarray
    weights: np.ndarray

    @classmethod
    def from_dense(cls, matrix: np.ndarray) -> _SparseMatrix:
        """Build the sparse matrix of a dense one, (rows, columns) with values >= 0; rows are scaled to add up to 1."""
        weights = matrix / matrix.sum(axis=1, keepdims=True)
        weights[weights < _NEGLIGIBLE] = 0.0
        max_entries = int((weights > 0).sum(axis=1).max())
        # The columns with the largest weights; rows with fewer entries are filled up with zeros.
        largest_first = np.argsort(-weights, axis=1, kind="stable")[:, :max_entries]
        # In increasing order columns are read fastest.
        columns = np.sort(largest_first, axis=1)
        return cls(columns, np.take_along_axis(weights, columns, axis=1).astype(np.float32))

    def multiply(self, fields: np.ndarray, axis: int) -> np.ndarray:
        """Multiply the matrix with fields along one axis.

        Args:
            fields: (..., h, w) float32.
            axis: axis that is replaced by the rows of the matrix; -2 gives (..., H, w), -1 gives (..., h, W).

        Returns:
            The product, float32.
        """
        # N is the number of rows of the matrix.
        weights_KN = self.weights.T
        if axis == -2:
            weights_KN = np.ascontiguousarray(weights_KN)[..., None]
        # The k-th entries of all rows are added at once.
        total = weights_KN[0] * fields.take(self.columns[:, 0], axis=axis)
        for k in range(1, len(weights_KN)):
            total += weights_KN[k] * fields.take(self.columns[:, k], axis=axis)
        return total


class Regridder:
    """Interpolation of fields from a source grid to a target grid.

    A missing value gets the weight 0, and the other weights of the target cell are scaled to add up to 1. A target cell
    is missing if less than half of the original weight belongs to valid values.

    Args:
        source: grid of the fields.
        target: grid to interpolate to.
        method: ``bilinear``, ``conservative`` or ``nearest``; see the docstring of this module.
        vector: True if the fields are a component of a vector, which changes its sign across a pole.
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
            # The area between two latitudes is proportional to the difference of their sines. Latitudes descend, so
            # the sign is changed for ascending edges.
            target_row_edges = -np.sin(np.deg2rad(target.lat_bounds))
            source_row_edges = -np.sin(np.deg2rad(source.lat_bounds))
            rows = _compute_overlaps(target_row_edges, source_row_edges)
            # A target cell can overlap source cells one turn further west or east.
            columns = np.zeros((len(target.lon), len(source.lon)))
            for turn in (-360.0, 0.0, 360.0):
                source_column_edges = _compute_column_edges(source.lon) + turn
                columns += _compute_overlaps(_compute_column_edges(target.lon), source_column_edges)
        elif method == "bilinear":
            self._add_north = bool(90.0 - abs(source.lat[0]) > _AT_POLE_DEGREES)
            self._add_south = bool(90.0 - abs(source.lat[-1]) > _AT_POLE_DEGREES)
            north_pole = [90.0] if self._add_north else []
            south_pole = [-90.0] if self._add_south else []
            lat = np.concatenate([north_pole, source.lat, south_pole])
            # Latitudes descend, and the interpolation needs ascending coordinates.
            rows = _build_linear_matrix(-target.lat, -lat)
            columns = _build_periodic_matrix(target.lon, source.lon)
        else:
            # Distances in longitude are measured along the shorter way round the globe.
            distance = np.abs(target.lon[:, None] - source.lon)
            columns = _build_nearest_matrix(np.minimum(distance, 360.0 - distance))
            rows = _build_nearest_matrix(np.abs(target.lat[:, None] - source.lat))
        self._rows = _SparseMatrix.from_dense(rows)
        self._columns = _SparseMatrix.from_dense(columns)
        # Orthonormal functions of longitude. The row on a pole is the projection of the row next to it onto them.
        angle = np.deg2rad(source.lon)
        wave = np.ones((1, len(angle)))
        if vector:
            wave = np.stack([np.cos(angle), np.sin(angle)]) * np.sqrt(2.0)
        self._pole_waves = (wave / np.sqrt(len(angle))).astype(np.float32)
        self._pole_mean = np.full((1, len(angle)), len(angle) ** -0.5, dtype=np.float32)

    def apply(self, fields: np.ndarray) -> np.ndarray:
        """Interpolate fields (..., h, w) to the target grid, (..., H, W) float32; missing values are NaN in both."""
        fields = np.asarray(fields, dtype=np.float32)
        missing = np.isnan(fields)
        if not missing.any():
            return self._average(fields, self._pole_waves)
        # The mean of the valid values is the mean with zeros instead of missing values over the valid weight.
        total = self._average(np.where(missing, np.float32(0.0), fields), self._pole_waves)
        valid_weight = self._average((~missing).astype(np.float32), self._pole_mean)
        return np.divide(total, valid_weight, out=np.full_like(total, np.nan), where=valid_weight >= _LEAST_VALID)

    def _average(self, fields: np.ndarray, pole_functions: np.ndarray) -> np.ndarray:
        """Interpolate fields without missing values to the target grid, (..., H, W) float32.

        For ``bilinear``, rows on the poles are added first if the source grid has none there.

        Args:
            fields: (..., h, w) float32.
            pole_functions: (functions, w) orthonormal functions of longitude. A row on a pole is the projection of the
                row next to it onto them.
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


def _compute_overlaps(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return the overlap of each target interval with each source interval, (num_targets, num_sources).

    Args:
        target: (num_targets + 1,) ascending edges of adjacent intervals.
        source: (num_sources + 1,) ascending edges of adjacent intervals.
    """
    upper = np.minimum(target[1:, None], source[1:])
    lower = np.maximum(target[:-1, None], source[:-1])
    return np.maximum(upper - lower, 0.0)


def _compute_column_edges(lon: np.ndarray) -> np.ndarray:
    """Return the (W + 1,) edges of the columns of a grid, in degrees and ascending; the last is the first plus 360.

    Args:
        lon: (W,) centres of the columns in degrees, ascending. Edges are half way between neighbouring centres.
    """
    inner = 0.5 * (lon[1:] + lon[:-1])
    west = 0.5 * (lon[0] + lon[-1] - 360.0)
    return np.concatenate([[west], inner, [west + 360.0]])


def _build_linear_matrix(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return the matrix of linear interpolation from source to target coordinates, (num_targets, num_sources).

    Targets beyond the ends of the source get the value at the end.

    Args:
        target: (num_targets,) coordinates.
        source: (num_sources,) ascending coordinates.
    """
    # Each target lies between the sources `before` and `after`; beyond an end, they are the two at this end.
    after = np.clip(np.searchsorted(source, target, side="right"), 1, len(source) - 1)
    before = after - 1
    after_weight = np.clip((target - source[before]) / (source[after] - source[before]), 0.0, 1.0)
    matrix = np.zeros((len(target), len(source)))
    matrix[np.arange(len(target)), before] = 1.0 - after_weight
    matrix[np.arange(len(target)), after] = after_weight
    return matrix


def _build_periodic_matrix(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return the matrix of linear interpolation along a circle of latitude, (num_targets, num_sources).

    Args:
        target: (num_targets,) longitudes in degrees.
        source: (num_sources,) ascending longitudes in degrees.
    """
    extended = np.concatenate([[source[-1] - 360.0], source, [source[0] + 360.0]])
    extended_matrix = _build_linear_matrix(target, extended)
    # The two added columns are the last and the first of the source.
    matrix = extended_matrix[:, 1:-1]
    matrix[:, -1] += extended_matrix[:, 0]
    matrix[:, 0] += extended_matrix[:, -1]
    return matrix


def _build_nearest_matrix(distance: np.ndarray) -> np.ndarray:
    """Return a matrix with 1 at the nearest source row or column of each target and 0 elsewhere.

    Args:
        distance: (num_targets, num_sources) distances in degrees; the result has the same shape.
    """
    matrix = np.zeros_like(distance)
    # Rounding makes distances equal that differ by rounding errors only; of equal ones argmin takes the first.
    nearest = np.round(distance, 6).argmin(axis=1)
    matrix[np.arange(len(distance)), nearest] = 1.0
    return matrix
