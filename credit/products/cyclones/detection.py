"""Detection of tropical cyclones in the fields of one lead time of one forecast.

The method follows TempestExtremes: P. A. Ullrich and C. M. Zarzycki (2017), doi:10.5194/gmd-10-1069-2017. The
criteria are taken from Ullrich et al. (2021), doi:10.5194/gmd-14-5023-2021: a minimum of pressure that is enclosed by
higher pressure, and a warm core that is enclosed by lower thickness of the layer from 500 to 300 hPa. The vorticity
criterion is taken from F. Vitart, J. L. Anderson and W. F. Stern (1997), J. Climate 10, 2527.

Shape suffixes: H latitude rows, W longitude columns, P x Q cells of a patch around a centre.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from credit.grid import LatLonGrid
from credit.physics.great_circle import compute_great_circle_distance
from credit.products.section import CycloneTracksSection

# Structure for `ndimage.label`: cells that touch at an edge or a corner are connected.
_CONNECTED = np.ones((3, 3), dtype=int)
# Smallest search radius of the core in cells, so that the search includes neighbouring cells on a coarse grid.
_MIN_CORE_CELLS = 1.5


@dataclass(frozen=True)
class Centre:
    """Centre of a cyclone at one valid time.

    Attributes:
        latitude: latitude in degrees north, interpolated between cells.
        longitude: longitude in degrees east, 0 to 360, interpolated between cells.
        pressure: mean sea level pressure of the cell in hPa.
        vorticity: largest cyclonic vorticity within the core radius in s-1, positive in both hemispheres; None if the
            vorticity criterion is not applied.
        wind: largest wind speed within the pressure radius in m s-1; None if the forecasts do not contain the wind, or
            all cells within the radius are missing.
    """

    latitude: float
    longitude: float
    pressure: float
    vorticity: float | None = None
    wind: float | None = None


@dataclass(frozen=True)
class CycloneFields:
    """Fields (H, W) of one member and lead time in which cyclones are searched.

    Attributes:
        pressure: mean sea level pressure in hPa.
        vorticity: relative vorticity at 850 hPa in s-1; None turns the vorticity criterion off.
        thickness: thickness of the warm layer in m; None turns the warm-core criterion off.
        wind: wind speed near the surface in m s-1; None if the forecasts do not contain it.
    """

    pressure: np.ndarray
    vorticity: np.ndarray | None = None
    thickness: np.ndarray | None = None
    wind: np.ndarray | None = None


@dataclass(frozen=True)
class _Patch:
    """Rectangle of P x Q grid cells around a centre.

    Attributes:
        rows: (P,) indices of the rows in the grid.
        columns: (Q,) indices of the columns in the grid.
        distance_PQ: great-circle distance of each cell from the centre in degrees.
        centre: row and column of the centre within the patch.
    """

    rows: np.ndarray
    columns: np.ndarray
    distance_PQ: np.ndarray
    centre: tuple[int, int]

    def select_values(self, field_HW: np.ndarray) -> np.ndarray:
        """Return the values (P, Q) of a field in the cells of the patch."""
        return field_HW[self.rows[:, None], self.columns]


class CycloneDetector:
    """Detector of the centres of tropical cyclones.

    Args:
        section: parameters of the criteria.
        grid: grid of the fields.
    """

    def __init__(self, section: CycloneTracksSection, grid: LatLonGrid) -> None:
        self._section = section
        self._grid = grid
        self._spacing = float(np.abs(np.diff(grid.lat)).max())
        self._core_radius = max(section.core_radius, _MIN_CORE_CELLS * self._spacing)

    def find(self, fields: CycloneFields) -> list[Centre]:
        """Return the centres of cyclones in increasing order of pressure.

        Args:
            fields: fields of one member at one lead time.
        """
        is_minimum_HW = fields.pressure == ndimage.minimum_filter(fields.pressure, size=3, mode=("nearest", "wrap"))
        is_minimum_HW[np.abs(self._grid.lat) > self._section.max_latitude] = False
        cells = np.argwhere(is_minimum_HW)
        # Sort by pressure, so that the deepest of several close centres is found first and kept.
        cells = cells[np.argsort(fields.pressure[tuple(cells.T)], kind="stable")]
        centres: list[Centre] = []
        for row, column in cells.tolist():
            lat = self._grid.lat[row]
            lon = self._grid.lon[column]
            distances = [compute_great_circle_distance(lat, lon, other.latitude, other.longitude) for other in centres]
            if distances and min(distances) < self._section.separation:
                continue
            centre = self._find_centre(fields, row, column)
            if centre is not None:
                centres.append(centre)
        return centres

    def _find_centre(self, fields: CycloneFields, row: int, column: int) -> Centre | None:
        """Return the centre at a cell with a minimum of pressure; None if the cell does not meet all criteria."""
        section = self._section
        patch = self._build_patch(row, column, section.pressure_radius)
        if not is_enclosed(patch, fields.pressure, section.pressure_rise, section.pressure_radius):
            return None
        core = self._build_patch(row, column, self._core_radius)
        is_core_PQ = core.distance_PQ <= self._core_radius
        vorticity = None
        if fields.vorticity is not None:
            sign = 1.0 if self._grid.lat[row] >= 0 else -1.0
            vorticity = float(np.nanmax(np.where(is_core_PQ, sign * core.select_values(fields.vorticity), -np.inf)))
            if vorticity < section.min_vorticity:
                return None
        if fields.thickness is not None:
            thickness_PQ = np.where(is_core_PQ, core.select_values(fields.thickness), -np.inf)
            patch_row, patch_column = np.unravel_index(thickness_PQ.argmax(), thickness_PQ.shape)
            warm = self._build_patch(
                int(core.rows[patch_row]), int(core.columns[patch_column]), section.warm_core_radius
            )
            # With the opposite sign, the maximum of thickness must be enclosed like the minimum of pressure.
            if not is_enclosed(warm, -fields.thickness, section.thickness_fall, section.warm_core_radius):
                return None
        wind = None
        if fields.wind is not None:
            near_winds = patch.select_values(fields.wind)[patch.distance_PQ <= section.pressure_radius]
            near_winds = near_winds[np.isfinite(near_winds)]
            if near_winds.size:
                wind = float(near_winds.max())
        latitude, longitude = self._refine_position(fields.pressure, row, column)
        return Centre(latitude, longitude, float(fields.pressure[row, column]), vorticity, wind)

    def _refine_position(self, pressure_HW: np.ndarray, row: int, column: int) -> tuple[float, float]:
        """Return latitude and longitude of the pressure minimum, from parabolas through a cell and its neighbours."""
        num_rows, num_columns = pressure_HW.shape
        lat = float(self._grid.lat[row])
        # Treat rows as equally spaced. The spacing of a Gaussian grid differs by less than 1 % in a few rows.
        if 0 < row < num_rows - 1:
            half_step = 0.5 * (self._grid.lat[row + 1] - self._grid.lat[row - 1])
            lat += half_step * find_parabola_vertex(*pressure_HW[row - 1 : row + 2, column])
        neighbours = pressure_HW[row, np.arange(column - 1, column + 2) % num_columns]
        lon = float(self._grid.lon[column]) + 360.0 / num_columns * find_parabola_vertex(*neighbours)
        return lat, lon % 360.0

    def _build_patch(self, row: int, column: int, radius: float) -> _Patch:
        """Return the patch around a cell: all cells within a radius in degrees, and at least one cell beyond it."""
        lat = self._grid.lat[row]
        reach = radius + 1.5 * self._spacing
        rows = np.flatnonzero(np.abs(self._grid.lat - lat) <= reach)
        # Near a pole, a circle of a given radius spans more degrees of longitude.
        num_columns = len(self._grid.lon)
        sine = np.sin(np.deg2rad(min(reach, 89.0))) / max(np.cos(np.deg2rad(lat)), 1e-6)
        half_width = num_columns // 2
        if sine < 1.0:
            half_width = min(half_width, int(np.ceil(np.rad2deg(np.arcsin(sine)) / (360.0 / num_columns))) + 1)
        # If the patch spans all longitudes, each column occurs once.
        offsets = np.arange(-half_width, half_width + 1)[:num_columns]
        columns = (column + offsets) % num_columns
        distance_PQ = compute_great_circle_distance(
            lat, self._grid.lon[column], self._grid.lat[rows][:, None], self._grid.lon[columns]
        )
        return _Patch(rows, columns, distance_PQ, (int(np.searchsorted(rows, row)), half_width))


def find_parabola_vertex(before: float, middle: float, after: float) -> float:
    """Return the position of the minimum of a parabola through three values, in steps from the middle (-0.5 to 0.5).

    Args:
        before: value one step before the middle.
        middle: value in the middle; it must not be larger than the other two values.
        after: value one step after the middle.
    """
    curvature = before - 2.0 * middle + after
    if not curvature > 0:
        return 0.0
    return float(np.clip(0.5 * (before - after) / curvature, -0.5, 0.5))


def is_enclosed(patch: _Patch, field_HW: np.ndarray, rise: float, radius: float) -> bool:
    """Return True if every path from the centre of a patch reaches a value that is higher by `rise` within a radius.

    Args:
        patch: cells around the centre; the patch must extend beyond the radius.
        field_HW: field to test; missing cells are treated as not higher.
        rise: required difference from the value at the centre.
        radius: great-circle distance in degrees.
    """
    values_PQ = patch.select_values(field_HW)
    is_low_PQ = ~(values_PQ >= values_PQ[patch.centre] + rise)
    labels_PQ, _ = ndimage.label(is_low_PQ, structure=_CONNECTED)
    is_connected_PQ = labels_PQ == labels_PQ[patch.centre]
    return not (is_connected_PQ & (patch.distance_PQ > radius)).any()
