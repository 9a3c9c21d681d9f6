"""Grid and calendar that all source files share."""

from __future__ import annotations

import logging

import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.data.formats.cf import Coordinates
from credit.data.formats.regrid import Regridder
from credit.errors import DataError
from credit.grid import AxisOrder, LatLonGrid

logger = logging.getLogger(__name__)

# These calendars differ only before October 1582.
_GREGORIAN_CALENDARS = {"standard", "proleptic_gregorian"}
_FIRST_GREGORIAN_YEAR = 1583


class SharedCoordinates:
    """Grid and calendar that all files share.

    The calendar of the run is the calendar of the first file with a time. The grid of the run is the grid of the first
    file, unless `grid` is given.

    Args:
        grid: grid to which all files are regridded; None if all files must be on the same grid.

    Attributes:
        grid: grid of the run; None until the first file has been scanned, unless a grid was given.
        calendar: calendar of the run; None until the first file with a time has been scanned.
    """

    def __init__(self, grid: LatLonGrid | None = None) -> None:
        self.grid = grid
        self.calendar: Calendar | None = None
        self._has_target_grid = grid is not None
        # Names of the files that determined the grid and the calendar, for error messages.
        self._grid_origin = ""
        self._calendar_origin = ""
        # Coordinate bytes -> (grid, axis order, True if the grid is the grid of the run).
        self._grids: dict[tuple[bytes, ...], tuple[LatLonGrid, AxisOrder, bool]] = {}
        # (coordinate bytes, method, vector) -> regridder.
        self._regridders: dict[tuple, Regridder] = {}

    def find_regridder(
        self, coordinates: Coordinates, dims: dict[str, str], method: str, vector: bool, origin: str
    ) -> tuple[LatLonGrid, AxisOrder, Regridder | None]:
        """Return the grid of a variable in a file, and the regridder to the grid of the run.

        If several files have equal coordinates, the coordinates are processed once.

        Args:
            coordinates: coordinates of the file.
            dims: mapping from the roles ``lat`` and ``lon`` to the names of the dimensions of the variable.
            method: interpolation method, see `Regridder`.
            vector: True if the variable is a component of a vector.
            origin: name of the file, for error messages.

        Returns:
            The grid, the order of rows and columns in the file, and the regridder to the grid of the run. The regridder
            is None if the file is on the grid of the run.

        Raises:
            DataError: if the coordinates do not form a global grid, or if no grid was given and the grid differs from
                the grid of the first file.
        """
        lat = dims["lat"]
        lon = dims["lon"]
        _, lat_name = coordinates.role_and_name_by_dim[lat]
        bounds = coordinates.find_bounds(lat_name)
        arrays = [coordinates.read_values(lat), coordinates.read_values(lon)]
        if bounds is not None:
            arrays.append(bounds)
        # Building a grid or a regridder takes longer than comparing the bytes of the coordinates.
        key = tuple(array.tobytes() for array in arrays)
        if key not in self._grids:
            grid, axis_order = coordinates.build_grid(lat, lon, origin)
            self._grids[key] = grid, axis_order, self._is_grid_of_run(grid, origin)
        grid, axis_order, is_grid_of_run = self._grids[key]
        if is_grid_of_run:
            return grid, axis_order, None
        if (key, method, vector) not in self._regridders:
            self._regridders[key, method, vector] = Regridder(grid, self.grid, method, vector)
        return grid, axis_order, self._regridders[key, method, vector]

    def _is_grid_of_run(self, grid: LatLonGrid, origin: str) -> bool:
        """Return True if `grid` is the grid of the run; if no grid was given, the first `grid` becomes the run's grid.

        Raises:
            DataError: if no grid was given and `grid` differs from the grid of the first file.
        """
        if self.grid is None:
            self.grid = grid
            self._grid_origin = origin
        difference = self.grid.describe_mismatch(grid)
        if difference and not self._has_target_grid:
            raise DataError(
                f"{self._grid_origin} and {origin} are on different grids: {difference}; set data.grid to the grid "
                "that all files should be regridded to"
            )
        if difference:
            logger.info("%s and other files on its grid are regridded to data.grid: %s", origin, difference)
        return difference is None

    def decode_times(self, coordinate: xr.Variable, values: np.ndarray, origin: str) -> np.ndarray:
        """Decode times to int64 minutes since 1900, in the shape of `values`.

        The calendar of the first file becomes the calendar of the run.

        Args:
            coordinate: time coordinate of the file, whose attributes are the units and the calendar of `values`.
            values: encoded times, or encoded bounds of times.
            origin: name of the file, for error messages.

        Raises:
            DataError: if there are no times, times are missing or cannot be decoded, or the calendar differs from the
                calendar of the other files.
        """
        if values.size == 0:
            raise DataError(f"{origin}: the time axis has no time; remove the file from data.sources")
        if not np.isfinite(np.asarray(values, dtype=np.float64)).all():
            raise DataError(f"{origin}: the time coordinate has missing values; write the times, or remove the file")
        try:
            calendar = Calendar(str(coordinate.attrs.get("calendar", "standard")))
            minutes = calendar.minutes_from_cf(values, str(coordinate.attrs.get("units", "")))
        except DataError as error:
            raise DataError(f"{origin}: {error}; rewrite the time axis, for example as hours since a date") from error
        # The first file determines the calendar; later files must have the same calendar, or one with the same dates.
        if self.calendar is None:
            self.calendar = calendar
            self._calendar_origin = origin
        calendar_names = {calendar.name, self.calendar.name}
        is_gregorian = calendar_names <= _GREGORIAN_CALENDARS
        is_compatible = is_gregorian and calendar.datetime(minutes.min()).year >= _FIRST_GREGORIAN_YEAR
        if len(calendar_names) > 1 and not is_compatible:
            raise DataError(
                f"{origin} has the calendar {calendar.name}, {self._calendar_origin} has {self.calendar.name}; all "
                "files must share one calendar; rewrite the time axis of the other files"
            )
        return minutes
