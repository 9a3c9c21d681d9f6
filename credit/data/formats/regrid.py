"""Regridding from one global latitude-longitude grid to another.

Each method computes a weighted mean over rows and a weighted mean over columns. The weights form sparse matrices.

- ``bilinear``: linear in latitude and longitude; longitude is periodic. If the source grid has no row at a pole, such a
  row is computed from the row next to the pole. For a scalar, it is the mean of this row. For a vector component, it is
  the component of zonal wavenumber 1, because a single vector at the pole has this shape as a function of longitude.
- ``conservative``: the mean over the source cells that a target cell covers, weighted by the covered area (first order;
  P. W. Jones, Mon. Wea. Rev. 127, 2204 (1999)). The global mean is preserved.
- ``nearest``: the value of the nearest row and column; if two are equally near, the first in the order of the grid.

Letters of shapes: h rows and w columns of the source grid, H rows and W columns of the target grid. K is the largest
number of source columns that contribute to one target column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from credit.grid import LatLonGrid

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# Weights below this value are rounding errors of cell edges, and are set to 0.
_NEGLIGIBLE = 1e-9
# A target cell is valid if at least half of its weight belongs to valid values. The tolerance includes exactly half.
_LEAST_VALID = 0.5 - 1e-5
# A row that is closer to a pole than this distance is treated as a row at the pole.
_AT_POLE_DEGREES = 1e-3


@dataclass(frozen=True)
class _ColumnWeights:
    """Weights of the columns that contribute to each column of the target grid.

    Attributes:
        columns: (K, W) int64 index of the source column of each weight.
        weights: (K, W) float32 weights, which add up to 1 for each target column; unused entries are 0.
    """

    columns: np.ndarray
    weights: np.ndarray

    @classmethod
    def from_matrix(cls, matrix: csr_array) -> _ColumnWeights:
        """Build the weights from a sparse matrix (W, w) whose column indices are in increasing order."""
        num_entries = np.diff(matrix.indptr)
        shape = (len(num_entries), int(num_entries.max()))
        columns = np.zeros(shape, dtype=np.int64)
        weights = np.zeros(shape, dtype=np.float32)
        is_used = np.arange(shape[1]) < num_entries[:, None]
        columns[is_used] = matrix.indices
        weights[is_used] = matrix.data
        return cls(np.ascontiguousarray(columns.T), np.ascontiguousarray(weights.T))

    def average(self, field: np.ndarray) -> np.ndarray:
        """Return the weighted means over the columns of a field (h, w) as an array (h, W) float32."""
        total = self.weights[0] * field.take(self.columns[0], axis=1)
        # Add the k-th contributions to all columns at once.
        for columns, weights in zip(self.columns[1:], self.weights[1:], strict=True):
            total += weights * field.take(columns, axis=1)
        return total


class Regridder:
    """Regridder of fields from a source grid to a target grid.

    A missing value gets the weight 0, and the other weights of the target cell are scaled to add up to 1. A target cell
    is missing if less than half of the original weight belongs to valid values.

    Args:
        source: grid of the fields.
        target: grid to which the fields are regridded.
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
        # Dense matrices of the weights, (H, h) for rows and (W, w) for columns. Only `bilinear` adds rows at the poles.
        self._add_north = False
        self._add_south = False
        if method == "conservative":
            # The area between two latitudes is proportional to the difference of their sines. Latitudes descend, so
            # the sign is changed for ascending edges.
            target_row_edges = -np.sin(np.deg2rad(target.lat_bounds))
            source_row_edges = -np.sin(np.deg2rad(source.lat_bounds))
            rows = _compute_overlaps(target_row_edges, source_row_edges)
            # A target cell can overlap source cells that are shifted by 360 degrees.
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
            # Distances in longitude are measured along the shorter way around the globe.
            distance = np.abs(target.lon[:, None] - source.lon)
            columns = _build_nearest_matrix(np.minimum(distance, 360.0 - distance))
            rows = _build_nearest_matrix(np.abs(target.lat[:, None] - source.lat))
        # The product of a sparse matrix with a field adds complete rows, which is limited only by memory bandwidth.
        # Columns are gathered instead, because the product would need transposed fields.
        self._rows = _build_sparse_matrix(rows)
        column_matrix = _build_sparse_matrix(columns)
        self._columns = _ColumnWeights.from_matrix(column_matrix)
        # Use the order (rows or columns first) with fewer operations; gathering a value takes about four times as long
        # as adding a value. The results of both orders differ only by rounding.
        rows_first = self._rows.nnz * len(source.lon) + 4 * column_matrix.nnz * len(target.lat)
        columns_first = 4 * column_matrix.nnz * rows.shape[1] + self._rows.nnz * len(target.lon)
        self._is_rows_first = rows_first <= columns_first
        # Orthonormal functions of longitude. The row at a pole is the projection of its neighbour row onto them.
        angle = np.deg2rad(source.lon)
        wave = np.ones((1, len(angle)))
        if vector:
            wave = np.stack([np.cos(angle), np.sin(angle)]) * np.sqrt(2.0)
        self._pole_waves = (wave / np.sqrt(len(angle))).astype(np.float32)
        self._pole_mean = np.full((1, len(angle)), len(angle) ** -0.5, dtype=np.float32)

    def apply(self, fields: np.ndarray) -> np.ndarray:
        """Regrid fields (..., h, w) to the target grid, (..., H, W) float32; missing values are NaN."""
        fields = np.asarray(fields, dtype=np.float32)
        missing = np.isnan(fields)
        if not missing.any():
            return self._average(fields, self._pole_waves)
        # The mean of the valid values is the mean with zeros for missing values, divided by the weight of valid values.
        total = self._average(np.where(missing, np.float32(0.0), fields), self._pole_waves)
        valid_weight = self._average((~missing).astype(np.float32), self._pole_mean)
        return np.divide(total, valid_weight, out=np.full_like(total, np.nan), where=valid_weight >= _LEAST_VALID)

    def _average(self, fields: np.ndarray, pole_functions: np.ndarray) -> np.ndarray:
        """Regrid fields without missing values to the target grid, (..., H, W) float32.

        Args:
            fields: (..., h, w) float32.
            pole_functions: (functions, w) orthonormal functions of longitude. A row at a pole is the projection of its
                neighbour row onto these functions.
        """
        target_shape = (self._rows.shape[0], self._columns.weights.shape[1])
        averages = np.empty((*fields.shape[:-2], *target_shape), dtype=np.float32)
        # A single field fits in the CPU cache.
        for index in np.ndindex(fields.shape[:-2]):
            field = self._add_poles(fields[index], pole_functions)
            # Infinite values give infinite or missing values, which the reader reports.
            with np.errstate(invalid="ignore"):
                if self._is_rows_first:
                    averages[index] = self._columns.average(self._rows @ field)
                else:
                    averages[index] = self._rows @ self._columns.average(field)
        return averages

    def _add_poles(self, field: np.ndarray, pole_functions: np.ndarray) -> np.ndarray:
        """Add rows at the poles to a field (h, w) if the method needs these rows; see `_average`."""
        rows = [field]
        if self._add_north:
            rows.insert(0, field[:1] @ pole_functions.T @ pole_functions)
        if self._add_south:
            rows.append(field[-1:] @ pole_functions.T @ pole_functions)
        return np.concatenate(rows) if len(rows) > 1 else field


def _build_sparse_matrix(dense: np.ndarray) -> csr_array:
    """Return a sparse float32 copy of a dense matrix with values >= 0; each row is scaled to add up to 1."""
    # Import here, because the import is slow and only regridding needs it.
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
    """Return the (W + 1,) ascending edges of the columns of a grid in degrees; the last is the first plus 360.

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
    # Each target is between the sources `before` and `after`. Beyond an end, these are the two sources at this end.
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
    # The two added columns are copies of the last and the first column of the source.
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
    # Round distances, so that rounding errors do not break ties; `argmin` returns the first of equal distances.
    nearest = np.round(distance, 6).argmin(axis=1)
    matrix[np.arange(len(distance)), nearest] = 1.0
    return matrix
