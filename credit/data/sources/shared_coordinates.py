"""Grid and calendar that the source files share."""

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

    The first file with a time decides the calendar. The first file also decides the grid, unless `grid` is given.

    Args:
        grid: grid to which all files are regridded; None if all files must be on one grid.

    Attributes:
        grid: grid of the run; None before the first file if none is given.
        calendar: calendar of the run; None before the first file with a time.
    """

    def __init__(self, grid: LatLonGrid | None = None) -> None:
        self.grid = grid
        self.calendar: Calendar | None = None
        self._has_target_grid = grid is not None
        # The files that have decided grid and calendar, for messages.
        self._grid_origin = ""
        self._calendar_origin = ""
        # Coordinates as bytes -> grid, axis order, and whether it is the grid of the run.
        self._grids: dict[tuple[bytes, ...], tuple[LatLonGrid, AxisOrder, bool]] = {}
        # (coordinates as bytes, method, vector) -> regridder.
        self._regridders: dict[tuple, Regridder] = {}

    def find_regridder(
        self, coordinates: Coordinates, dims: dict[str, str], method: str, vector: bool, origin: str
    ) -> tuple[LatLonGrid, AxisOrder, Regridder | None]:
        """Return the grid of a file, its axis order, and the regridder to the grid of the run (None if not needed).

        Equal coordinates of several files are processed once.

        Args:
            coordinates: coordinates of the file.
            dims: role (``lat``, ``lon``) -> dimension of the variable.
            method: method of `Regridder`.
            vector: True if the variable is a component of a vector.
            origin: name of the file, for error messages.

        Raises:
            DataError: if the coordinates are not those of a global grid, or the grid differs and none is given.
        """
        lat = dims["lat"]
        lon = dims["lon"]
        _, lat_name = coordinates.of_dim[lat]
        bounds = coordinates.find_bounds(lat_name)
        arrays = [coordinates.read_values(lat), coordinates.read_values(lon)]
        if bounds is not None:
            arrays.append(bounds)
        # Building a grid or a regridder takes longer than comparing the bytes of the coordinates.
        key = tuple(array.tobytes() for array in arrays)
        if key not in self._grids:
            grid, orientation = coordinates.build_grid(lat, lon, origin)
            self._grids[key] = grid, orientation, self._is_grid_of_run(grid, origin)
        grid, orientation, is_grid_of_run = self._grids[key]
        if is_grid_of_run:
            return grid, orientation, None
        if (key, method, vector) not in self._regridders:
            self._regridders[key, method, vector] = Regridder(grid, self.grid, method, vector)
        return grid, orientation, self._regridders[key, method, vector]

    def _is_grid_of_run(self, grid: LatLonGrid, origin: str) -> bool:
        """Return True if a grid is that of the run; the first grid becomes that of the run if none is given.

        Raises:
            DataError: if the grid differs and none is given.
        """
        if self.grid is None:
            self.grid = grid
            self._grid_origin = origin
        difference = self.grid.describe_mismatch(grid)
        if difference and not self._has_target_grid:
            raise DataError(
                f"{self._grid_origin} and {origin} are on different grids: {difference}; set data.grid to the grid "
                "that all are to be brought to"
            )
        if difference:
            logger.info("%s and files like it are brought to the grid of data.grid: %s", origin, difference)
        return difference is None

    def decode_times(self, coordinate: xr.Variable, values: np.ndarray, origin: str) -> np.ndarray:
        """Return times as int64 minutes, in the shape of `values`; the first calendar becomes that of the run.

        Args:
            coordinate: time coordinate whose units and calendar the values have.
            values: encoded times, or their bounds.
            origin: name of the file, for error messages.

        Raises:
            DataError: if there are no times, some are missing or cannot be decoded, or the calendar differs from that
                of other files.
        """
        if values.size == 0:
            raise DataError(f"{origin}: the time axis has no time; leave the file out")
        if not np.isfinite(np.asarray(values, dtype=np.float64)).all():
            raise DataError(f"{origin}: the time coordinate has missing values; write the times, or leave the file out")
        try:
            calendar = Calendar(str(coordinate.attrs.get("calendar", "standard")))
            minutes = calendar.minutes_from_cf(values, str(coordinate.attrs.get("units", "")))
        except DataError as error:
            raise DataError(f"{origin}: {error}; rewrite the time axis, for example as hours since a date") from error
        # The first file decides the calendar; later files must have the same one, or one with the same dates.
        if self.calendar is None:
            self.calendar = calendar
            self._calendar_origin = origin
        calendar_names = {calendar.name, self.calendar.name}
        is_gregorian = calendar_names <= _GREGORIAN_CALENDARS
        is_compatible = is_gregorian and calendar.datetime(minutes.min()).year >= _FIRST_GREGORIAN_YEAR
        if len(calendar_names) > 1 and not is_compatible:
            raise DataError(
                f"{origin} has the calendar {calendar.name}, {self._calendar_origin} has {self.calendar.name}; all "
                "files must share one"
            )
        return minutes
