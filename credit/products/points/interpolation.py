"""Interpolation of fields on a latitude-longitude grid to points.

Shape suffixes: N members, H latitude rows, W longitude columns, S points.
"""

from __future__ import annotations

import numpy as np

from credit.grid import LatLonGrid
from credit.physics.great_circle import great_circle_distance

# A point with more than half of its weight on missing cells is missing, as in `credit.data.formats.regrid`.
_LEAST_VALID = 0.5 - 1e-5


class PointInterpolator:
    """Interpolation to points, across the date line and up to the poles.

    ``bilinear`` is linear in latitude and in longitude between the four surrounding cells. Between the last row and a
    pole, the value on the pole is the mean of that row; for a component of a vector, it is the wave of wavenumber 1 of
    that row, because the components turn with longitude there. Missing cells get the weight 0, and the other weights
    are scaled to add up to 1. ``nearest`` takes the cell whose centre is nearest on the sphere.

    Args:
        grid: grid of the fields.
        lat_S: latitudes of the points in degrees north.
        lon_S: longitudes of the points in degrees east; any multiple of 360 may be added.
        method: ``bilinear`` or ``nearest``.
    """

    def __init__(self, grid: LatLonGrid, lat_S: np.ndarray, lon_S: np.ndarray, method: str) -> None:
        lat_S = np.asarray(lat_S, dtype=np.float64)
        lon_S = np.mod(np.asarray(lon_S, dtype=np.float64), 360.0)
        self._angle_W = np.deg2rad(grid.lon)
        if method == "nearest":
            rows_S, columns_S = find_nearest_cells(grid, lat_S, lon_S)
            # One row of the padded grid, which has a row on the north pole before the first.
            self._rows_2S = np.stack([rows_S + 1, rows_S + 1])
            self._columns_2S = np.stack([columns_S, columns_S])
            self._south_share_S = np.zeros(len(lat_S))
            self._east_share_S = np.zeros(len(lat_S))
            return
        # Rows with the poles, from north to south. A row that lies on a pole is repeated, with a share of 0.
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
        poles = [self._pole_row(fields_NHW[:, row], is_vector)[:, None] for row in (0, -1)]
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

    def _pole_row(self, row_NW: np.ndarray, is_vector: bool) -> np.ndarray:
        """Return the values on a pole at the longitude of each column, (N, W), from the row next to it."""
        row_NW = row_NW.astype(np.float64)
        is_valid = np.isfinite(row_NW)
        if not is_valid.all():
            # A row with missing cells, as of sea surface temperature, has the mean of its valid cells, if any.
            count = is_valid.sum(axis=1, keepdims=True)
            total = np.where(is_valid, row_NW, 0.0).sum(axis=1, keepdims=True)
            mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
            return np.broadcast_to(mean, row_NW.shape)
        if not is_vector:
            return np.broadcast_to(row_NW.mean(axis=1, keepdims=True), row_NW.shape)
        wave_2W = np.stack([np.cos(self._angle_W), np.sin(self._angle_W)])
        return 2.0 / row_NW.shape[1] * (row_NW @ wave_2W.T) @ wave_2W


def find_nearest_cells(grid: LatLonGrid, lat_S: np.ndarray, lon_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column of the cell whose centre is nearest to each point on the sphere, two (S,) arrays of int.

    Args:
        grid: the grid.
        lat_S: latitudes of the points in degrees north.
        lon_S: longitudes of the points in degrees east, 0 to 360.
    """
    # In each row, the nearest cell is the nearest in longitude, so only one column has to be compared.
    spacing = 360.0 / len(grid.lon)
    columns_S = np.rint(np.mod(lon_S - grid.lon[0], 360.0) / spacing).astype(int) % len(grid.lon)
    distance_SH = great_circle_distance(lat_S[:, None], lon_S[:, None], grid.lat, grid.lon[columns_S][:, None])
    return distance_SH.argmin(axis=1), columns_S
