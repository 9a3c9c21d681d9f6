"""Interpolation of fields on a latitude-longitude grid to points.

Shape suffixes: N members, H latitude rows, W longitude columns, S points.
"""

from __future__ import annotations

import numpy as np

from credit.grid import LatLonGrid
from credit.physics.great_circle import compute_great_circle_distance

# A point is missing if less than this share of its weight is on valid cells, as in `credit.data.formats.regrid`.
_LEAST_VALID = 0.5 - 1e-5


class PointInterpolator:
    """Interpolator of global fields to points, including points near the date line and the poles.

    ``bilinear`` is linear in latitude and in longitude between the four surrounding cells. A point beyond the last row
    before a pole is between this row and the pole. The value at the pole is the mean of this row. For a vector
    component, the value at the pole is the wave of zonal wavenumber 1 in this row, because the direction of a component
    changes with longitude there. Missing cells get the weight 0, and the other weights are scaled to add up to 1.

    ``nearest`` uses the cell whose centre is nearest on the sphere.

    Args:
        grid: grid of the fields.
        lat_S: latitudes of the points in degrees north.
        lon_S: longitudes of the points in degrees east, in any range.
        method: ``bilinear`` or ``nearest``.
    """

    def __init__(self, grid: LatLonGrid, lat_S: np.ndarray, lon_S: np.ndarray, method: str) -> None:
        lat_S = np.asarray(lat_S, dtype=np.float64)
        lon_S = np.mod(np.asarray(lon_S, dtype=np.float64), 360.0)
        self._angle_W = np.deg2rad(grid.lon)
        if method == "nearest":
            rows_S, columns_S = find_nearest_cells(grid, lat_S, lon_S)
            # The padded grid has an additional row at the north pole, so row indices increase by one.
            self._rows_2S = np.stack([rows_S + 1, rows_S + 1])
            self._columns_2S = np.stack([columns_S, columns_S])
            self._south_share_S = np.zeros(len(lat_S))
            self._east_share_S = np.zeros(len(lat_S))
            return
        # Latitudes from north to south, with both poles added. If the grid has a row at a pole, its copy gets weight 0.
        lat = np.concatenate([[90.0], grid.lat, [-90.0]])
        north = np.clip(np.searchsorted(-lat, -lat_S, side="right") - 1, 0, len(lat) - 2)
        distance = lat[north] - lat[north + 1]
        below = lat[north] - lat_S
        self._south_share_S = np.divide(below, distance, out=np.zeros_like(below), where=distance > 0)
        self._rows_2S = np.stack([north, north + 1])
        spacing = 360.0 / len(grid.lon)
        position = np.mod(lon_S - grid.lon[0], 360.0) / spacing
        west = np.floor(position).astype(int) % len(grid.lon)
        self._columns_2S = np.stack([west, (west + 1) % len(grid.lon)])
        self._east_share_S = position - np.floor(position)

    def apply(self, fields_NHW: np.ndarray, is_vector: bool = False) -> np.ndarray:
        """Return the values at the points, (N, S) float64, NaN where missing.

        Args:
            fields_NHW: fields, NaN where missing.
            is_vector: True for a component of a vector.
        """
        poles = [self._compute_pole_row(fields_NHW[:, row], is_vector)[:, None] for row in (0, -1)]
        padded = np.concatenate([poles[0], fields_NHW, poles[1]], axis=1)
        total_NS = np.zeros((len(fields_NHW), self._rows_2S.shape[1]))
        weight_NS = np.zeros_like(total_NS)
        for row, row_share_S in zip(self._rows_2S, (1.0 - self._south_share_S, self._south_share_S), strict=True):
            for column, column_share_S in zip(
                self._columns_2S, (1.0 - self._east_share_S, self._east_share_S), strict=True
            ):
                corner_NS = padded[:, row, column].astype(np.float64)
                is_valid = np.isfinite(corner_NS)
                share_S = row_share_S * column_share_S
                total_NS += np.where(is_valid, share_S * corner_NS, 0.0)
                weight_NS += is_valid * share_S
        is_known = weight_NS >= _LEAST_VALID
        return np.divide(total_NS, weight_NS, out=np.full_like(total_NS, np.nan), where=is_known)

    def _compute_pole_row(self, row_NW: np.ndarray, is_vector: bool) -> np.ndarray:
        """Return the values at a pole for the longitude of each column, (N, W), from the row next to the pole."""
        row_NW = row_NW.astype(np.float64)
        is_valid = np.isfinite(row_NW)
        if not is_valid.all():
            # If cells are missing, as for sea surface temperature, use the mean of the valid cells, or NaN.
            count = is_valid.sum(axis=1, keepdims=True)
            total = np.where(is_valid, row_NW, 0.0).sum(axis=1, keepdims=True)
            mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
            return np.broadcast_to(mean, row_NW.shape)
        if not is_vector:
            return np.broadcast_to(row_NW.mean(axis=1, keepdims=True), row_NW.shape)
        wave_2W = np.stack([np.cos(self._angle_W), np.sin(self._angle_W)])
        return 2.0 / row_NW.shape[1] * (row_NW @ wave_2W.T) @ wave_2W


def find_nearest_cells(grid: LatLonGrid, lat_S: np.ndarray, lon_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows (S,) and columns (S,) of the cells whose centres are nearest to each point on the sphere.

    Args:
        grid: grid of the cells.
        lat_S: latitudes of the points in degrees north.
        lon_S: longitudes of the points in degrees east, 0 to 360.
    """
    # In each row, the cell nearest in longitude is the nearest cell, so one column per point is compared.
    spacing = 360.0 / len(grid.lon)
    columns_S = np.rint(np.mod(lon_S - grid.lon[0], 360.0) / spacing).astype(int) % len(grid.lon)
    distance_SH = compute_great_circle_distance(lat_S[:, None], lon_S[:, None], grid.lat, grid.lon[columns_S][:, None])
    return distance_SH.argmin(axis=1), columns_S
