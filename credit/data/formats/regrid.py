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
largest number of source columns that contribute to one target column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from credit.grid import LatLonGrid

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# Smaller weights come from rounding errors in the edges of cells, and are set to 0.
_NEGLIGIBLE = 1e-9
# A target cell needs at least half of its weight from valid values. The tolerance keeps a cell with exactly one half.
_LEAST_VALID = 0.5 - 1e-5
# A row nearer to a pole than this lies on the pole.
_AT_POLE_DEGREES = 1e-3


@dataclass(frozen=True)
class _ColumnWeights:
    """Weights of the columns that contribute to each column of the target grid.

    Attributes:
        columns: (K, W) int64 source column of each weight.
        weights: (K, W) float32; columns with fewer contributions are filled up with 0. Each column adds up to 1.
    """

    columns: np.ndarray
    weights: np.ndarray

    @classmethod
    def from_matrix(cls, matrix: csr_array) -> _ColumnWeights:
        """Build the weights from a matrix (W, w), whose columns are in increasing order."""
        num_entries = np.diff(matrix.indptr)
        shape = (len(num_entries), int(num_entries.max()))
        columns = np.zeros(shape, dtype=np.int64)
        weights = np.zeros(shape, dtype=np.float32)
        is_used = np.arange(shape[1]) < num_entries[:, None]
        columns[is_used] = matrix.indices
        weights[is_used] = matrix.data
        return cls(np.ascontiguousarray(columns.T), np.ascontiguousarray(weights.T))

    def average(self, field: np.ndarray) -> np.ndarray:
        """Return the means over columns of a field (h, w), (h, W) float32."""
        total = self.weights[0] * field.take(self.columns[0], axis=1)
        # The k-th contributions to all columns are added at once.
        for columns, weights in zip(self.columns[1:], self.weights[1:], strict=True):
            total += weights * field.take(columns, axis=1)
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
        # A product of scipy's matrix with a field adds whole rows, as fast as memory allows. Columns are gathered,
        # because the same product would need transposed fields.
        self._rows = _build_sparse_matrix(rows)
        column_matrix = _build_sparse_matrix(columns)
        self._columns = _ColumnWeights.from_matrix(column_matrix)
        # Of the two orders, take the one with fewer operations; to gather a value takes about four times as long as to
        # add one. The results differ by rounding only.
        rows_first = self._rows.nnz * len(source.lon) + 4 * column_matrix.nnz * len(target.lat)
        columns_first = 4 * column_matrix.nnz * rows.shape[1] + self._rows.nnz * len(target.lon)
        self._is_rows_first = rows_first <= columns_first
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

        Args:
            fields: (..., h, w) float32.
            pole_functions: (functions, w) orthonormal functions of longitude. A row on a pole is the projection of the
                row next to it onto them.
        """
        target_shape = (self._rows.shape[0], self._columns.weights.shape[1])
        averages = np.empty((*fields.shape[:-2], *target_shape), dtype=np.float32)
        # One field at a time stays in the processor's cache.
        for index in np.ndindex(fields.shape[:-2]):
            field = self._add_poles(fields[index], pole_functions)
            # Infinite values become infinite or missing ones, which the reader refuses.
            with np.errstate(invalid="ignore"):
                if self._is_rows_first:
                    averages[index] = self._columns.average(self._rows @ field)
                else:
                    averages[index] = self._rows @ self._columns.average(field)
        return averages

    def _add_poles(self, field: np.ndarray, pole_functions: np.ndarray) -> np.ndarray:
        """Add rows on the poles to a field (h, w) if the method needs them; see `_average`."""
        rows = [field]
        if self._add_north:
            rows.insert(0, field[:1] @ pole_functions.T @ pole_functions)
        if self._add_south:
            rows.append(field[-1:] @ pole_functions.T @ pole_functions)
        return np.concatenate(rows) if len(rows) > 1 else field


def _build_sparse_matrix(dense: np.ndarray) -> csr_array:
    """Return the sparse float32 matrix of a dense one with values >= 0; its rows are scaled to add up to 1."""
    # Its import takes time that only regridding needs.
    from scipy.sparse import csr_array

    weights = dense / dense.sum(axis=1, keepdims=True)
    weights[weights < _NEGLIGIBLE] = 0.0
    return csr_array(weights.astype(np.float32))


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
