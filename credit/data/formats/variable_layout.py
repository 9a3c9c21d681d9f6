"""Layout of a variable in its file, and reading of its fields on the grid and in the units of the run.

Letters of shapes: T times, L levels that are read (1 for a 2-D variable), h, w rows and columns of the grid of the
file, H, W those of the grid of the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.data.formats.regrid import Regridder
from credit.data.formats.unit_checks import ImplausibleValues, ValueRules
from credit.data.formats.units import Conversion, ExpConversion
from credit.errors import DataError
from credit.grid import AxisOrder, LatLonGrid
from credit.physics.vertical import LevelMapping

# Fields that are unpacked at once. While they are unpacked, packed values are float64.
_FIELDS_AT_ONCE = 16


@dataclass(frozen=True)
class VariableLayout:
    """Layout of one variable in one file.

    Attributes:
        name: the variable's name in the file.
        dims: role (``time``, ``level``, ``lat``, ``lon``) -> dimension; other dimensions have length 1.
        level_rows: (L,) index in the file of each level that is read; None for a 2-D variable.
        level_mapping: mapping from these levels to those of the run; None if they are those of the run.
        grid: grid of the file.
        orientation: indices that bring the fields of the file into the order of the grid.
        regridder: interpolation to the grid of the run; None if the file is on that grid.
        conversion: conversion to the units of the config; None if the fields have these units.
        to_si: conversion from the units of the file to the SI units of formulas; None if the file has these units, or
            if no formula needs the variable.
        times: (N,) int64 minutes along the time dimension; None if the file has no time.
        window_bounds: (N, 2) int64 minutes of the time bounds; None if the file has none.
        attributes: units (after the conversion), standard_name, long_name and cell_methods, if the file has them.
        packing_step: step of packed integers in units of `attributes`, 0 if the variable is not packed.
        times_per_chunk: number of times in a chunk of the file, which are unpacked together; 1 without chunks.
        rules: checks of the values.
        origin: file and variable, for messages.
        calendar: calendar of `times`, for messages; None if no file has had a time yet.
    """

    name: str
    dims: dict[str, str]
    level_rows: tuple[int, ...] | None
    level_mapping: LevelMapping | None
    grid: LatLonGrid
    orientation: AxisOrder
    regridder: Regridder | None
    conversion: Conversion | None
    to_si: Conversion | ExpConversion | None
    times: np.ndarray | None
    window_bounds: np.ndarray | None
    attributes: dict[str, str]
    packing_step: float
    times_per_chunk: int
    rules: ValueRules
    origin: str
    calendar: Calendar | None

    @property
    def values_per_time(self) -> int:
        """Number of values that are read from the file for one time, L * h * w."""
        return len(self.level_rows or (0,)) * math.prod(self.grid.shape)

    def count_times_in_chunk(self, times: np.ndarray) -> int:
        """Return the largest number of the given times that lie in one chunk of the file, at least 1.

        Args:
            times: (M,) int64 minutes since 1900, increasing.
        """
        if self.times_per_chunk == 1 or self.times is None:
            return 1
        num_times = len(self.times)
        if num_times < 2 or len(times) < 2:
            return 1
        # Chunks may begin at any time of the file, so each time is taken as the first of a chunk.
        last_in_chunk = np.minimum(np.arange(num_times) + self.times_per_chunk, num_times) - 1
        stop = np.searchsorted(times, self.times[last_in_chunk], "right")
        start = np.searchsorted(times, self.times)
        return max(1, int((stop - start).max()))

    def read(self, dataset: xr.Dataset, position: int | slice) -> np.ndarray:
        """Return fields on the grid and in the units of the run, missing values as NaN.

        Args:
            dataset: the open file.
            position: index of one time, for (L, H, W), or a slice of T times, for (T, L, H, W).

        Raises:
            DataError: for a value that is implausible, see `credit.data.formats.unit_checks`.
        """
        return self.convert_to_run(self.orientation.apply(self._read_checked(dataset, position)))

    def read_on_file_grid(self, dataset: xr.Dataset, position: int | slice) -> np.ndarray:
        """Return fields for formulas, ([T,] L, h, w), on the grid of the file and in SI units.

        Arguments and errors are those of `read`.
        """
        rows = self.level_rows
        if rows is None or "level" not in self.dims:
            return self._read_in_si(dataset, position)
        time_shape: tuple[int, ...] = ()
        if isinstance(position, slice):
            time_shape = (position.stop - position.start,)
        chunks = dataset.variables[self.name].encoding.get("preferred_chunks", {})
        chunk_levels = chunks.get(self.dims["level"], 1)
        # A few fields at once are unpacked in memory that is used again; unpacking all would need new memory. Chunks
        # of the file are read as a whole.
        chunks_at_once = math.ceil(_FIELDS_AT_ONCE / (chunk_levels * math.prod(time_shape)))
        levels_at_once = chunks_at_once * chunk_levels
        fields = np.empty((*time_shape, len(rows), *self.grid.shape), dtype=np.float32)
        for start in range(0, len(rows), levels_at_once):
            levels = slice(start, start + levels_at_once)
            fields[..., levels, :, :] = self._read_in_si(dataset, position, levels)
        return fields

    def _read_in_si(self, dataset: xr.Dataset, position: int | slice, levels: slice = slice(None)) -> np.ndarray:
        """Return checked fields on some of the levels, in the order of the grid and in SI units."""
        fields = self.orientation.apply(self._read_checked(dataset, position, levels))
        return fields if self.to_si is None else self.to_si.apply(fields)

    def convert_to_run(self, fields: np.ndarray) -> np.ndarray:
        """Return fields on the grid of the file (..., h, w) on that of the run (..., H, W), in the units of the run."""
        if self.regridder is not None:
            fields = self.regridder.apply(fields)
        return fields if self.conversion is None else self.conversion.apply(fields)

    def _read_checked(self, dataset: xr.Dataset, position: int | slice, levels: slice = slice(None)) -> np.ndarray:
        """Return checked values on some of the levels, in the order and the units of the file."""
        values, implausible = self.rules.apply(self._read_stored(dataset, position, levels), levels)
        if implausible is not None:
            raise DataError(self._describe(implausible, position))
        return values

    def _describe(self, implausible: ImplausibleValues, position: int | slice) -> str:
        """Return a message about implausible values, with their level and time and the location of the first one."""
        levels = self.rules.levels
        level_and_time = ""
        if levels[0] is not None or len(levels) > 1:
            level_and_time = f", level {levels[implausible.row]:g}"
        if self.times is not None and self.calendar is not None:
            time_index = 0
            if "time" in self.dims and isinstance(position, slice):
                time_index = position.start + implausible.index[0]
            elif "time" in self.dims:
                time_index = position
            level_and_time += f" at {self.calendar.format(self.times[time_index])}"
        row, column = np.argwhere(self.orientation.apply(implausible.cells))[0]
        location = f"latitude {self.grid.lat[row]:g}, longitude {self.grid.lon[column]:g}"
        return f"{self.origin}{level_and_time}: {self.rules.describe(implausible, location)}"

    def _read_stored(self, dataset: xr.Dataset, position: int | slice, levels: slice) -> np.ndarray:
        """Return unpacked values of the file on some of the levels, ([T,] L, rows, columns) in its order."""
        variable = dataset.variables[self.name]
        # Dimensions without a role have length 1.
        index: dict[str, object] = {dim: 0 for dim in variable.dims if dim not in self.dims.values()}
        if "time" in self.dims:
            index[self.dims["time"]] = position
        has_levels = self.level_rows is not None and "level" in self.dims
        if has_levels:
            # netCDF reads increasing rows only; `inverse` brings them back into the order of the levels.
            increasing_rows, inverse = np.unique(self.level_rows[levels], return_inverse=True)
            index[self.dims["level"]] = increasing_rows
        selected = variable.isel(index)
        ordered_dims = [self.dims[role] for role in ("time", "level", "lat", "lon") if role in self.dims]
        values = selected.transpose(*[dim for dim in ordered_dims if dim in selected.dims]).values
        # A 2-D variable gets an axis of one level.
        values = values[..., inverse, :, :] if has_levels else values[..., None, :, :]
        # A file without time dimension has one field, whatever the slice.
        if isinstance(position, slice) and "time" not in self.dims:
            return values[None]
        return values
