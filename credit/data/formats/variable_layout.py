"""Layout of a variable in its file, and reading of its fields on the grid and in the units of the run.

Letters of shapes: T times, L levels that are read (1 for a 2-D variable), h rows and w columns of the grid of the file,
H rows and W columns of the grid of the run.
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

# Number of fields that are unpacked at once. A small number limits memory, because unpacking needs float64 copies.
_FIELDS_AT_ONCE = 16


@dataclass(frozen=True)
class VariableLayout:
    """Layout of one variable in one file.

    Attributes:
        name: name of the variable in the file.
        dims: role (``time``, ``level``, ``lat`` or ``lon``) -> name of the dimension; all other dimensions have
            length 1.
        level_indices: (L,) indices in the file of the levels that are read; None for a 2-D variable.
        level_mapping: mapping from the levels that are read to the levels of the run; None if the levels are equal and
            no formula needs their pressure.
        grid: grid of the file.
        axis_order: reordering of rows and columns of the file into the order of `grid`.
        regridder: regridder to the grid of the run; None if the file is on the grid of the run.
        conversion: conversion from the units of the file to the units of the run; None if the units are equal.
        si_conversion: conversion from the units of the file to the SI units of formulas; None if the file has SI
            units, or if no formula needs the variable.
        times: (N,) int64 minutes since 1900, all times of the file; None if the file has no time.
        window_bounds: (N, 2) int64 minutes since 1900, the bounds of the times; None if the file has no time bounds.
        attributes: units (after the conversion), standard_name, long_name and cell_methods, if they are in the file.
        packing_step: difference of adjacent packed values in the units of `attributes`; 0 without packing.
        times_per_chunk: number of times in a chunk of the file, which is always decompressed completely; 1 if the file
            has no chunks.
        rules: checks of the values.
        origin: names of the file and the variable, for error messages.
        calendar: calendar of `times`, for error messages; None if no file with a time has been opened yet.
    """

    name: str
    dims: dict[str, str]
    level_indices: tuple[int, ...] | None
    level_mapping: LevelMapping | None
    grid: LatLonGrid
    axis_order: AxisOrder
    regridder: Regridder | None
    conversion: Conversion | None
    si_conversion: Conversion | ExpConversion | None
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
        # A 2-D variable has one level.
        num_levels = len(self.level_indices or (0,))
        return num_levels * math.prod(self.grid.shape)

    def count_times_in_chunk(self, times: np.ndarray) -> int:
        """Return the largest number of the given times that are in the same chunk of the file, at least 1.

        Args:
            times: (M,) int64 minutes since 1900, increasing.
        """
        if self.times_per_chunk == 1 or self.times is None:
            return 1
        num_times = len(self.times)
        if num_times < 2 or len(times) < 2:
            return 1
        # A chunk may begin at any time of the file, so each time is tried as the first time of a chunk.
        last_in_chunk = np.minimum(np.arange(num_times) + self.times_per_chunk, num_times) - 1
        # The given times in such a chunk are those from `start` to `stop` - 1.
        start = np.searchsorted(times, self.times)
        stop = np.searchsorted(times, self.times[last_in_chunk], "right")
        return max(1, int((stop - start).max()))

    def read(self, dataset: xr.Dataset, position: int | slice) -> np.ndarray:
        """Read fields on the grid and in the units of the run, with missing values as NaN.

        Args:
            dataset: the open file.
            position: index of a time in the file, or a slice of T times.

        Returns:
            (L, H, W) for one time, (T, L, H, W) for a slice.

        Raises:
            DataError: if a value is implausible (see `credit.data.formats.unit_checks`).
        """
        return self.regrid_and_convert(self.axis_order.apply(self._read_checked(dataset, position)))

    def read_on_file_grid(self, dataset: xr.Dataset, position: int | slice) -> np.ndarray:
        """Read fields for formulas, on the grid of the file and in SI units, ([T,] L, h, w).

        The arguments and errors are the same as for `read`.
        """
        rows = self.level_indices
        if rows is None or "level" not in self.dims:
            return self._read_in_si(dataset, position)
        # A slice of times adds a leading axis to the result.
        time_shape: tuple[int, ...] = ()
        if isinstance(position, slice):
            time_shape = (position.stop - position.start,)
        chunks = dataset.variables[self.name].encoding.get("preferred_chunks", {})
        chunk_levels = chunks.get(self.dims["level"], 1)
        # Fields are unpacked in small groups, so that the groups reuse the same temporary memory. A group consists of
        # complete chunks, because the library always reads a complete chunk.
        fields_per_chunk = chunk_levels * math.prod(time_shape)
        chunks_at_once = math.ceil(_FIELDS_AT_ONCE / fields_per_chunk)
        levels_at_once = chunks_at_once * chunk_levels
        fields = np.empty((*time_shape, len(rows), *self.grid.shape), dtype=np.float32)
        for start in range(0, len(rows), levels_at_once):
            levels = slice(start, start + levels_at_once)
            fields[..., levels, :, :] = self._read_in_si(dataset, position, levels)
        return fields

    def _read_in_si(self, dataset: xr.Dataset, position: int | slice, levels: slice = slice(None)) -> np.ndarray:
        """Read and check the fields of a slice of levels, ([T,] levels, h, w) in the order of `grid` in SI units."""
        fields = self.axis_order.apply(self._read_checked(dataset, position, levels))
        return fields if self.si_conversion is None else self.si_conversion.apply(fields)

    def regrid_and_convert(self, fields: np.ndarray) -> np.ndarray:
        """Regrid fields (..., h, w) of the file to the grid of the run, (..., H, W), and convert them to its units."""
        if self.regridder is not None:
            fields = self.regridder.apply(fields)
        return fields if self.conversion is None else self.conversion.apply(fields)

    def _read_checked(self, dataset: xr.Dataset, position: int | slice, levels: slice = slice(None)) -> np.ndarray:
        """Read and check the values of a slice of levels, ([T,] levels, h, w) in the order and the units of the file.

        Raises:
            DataError: if a value is implausible.
        """
        stored_values = self._read_and_unpack(dataset, position, levels)
        values, implausible = self.rules.apply(stored_values, levels)
        if implausible is not None:
            raise DataError(self._describe_implausible(implausible, position))
        return values

    def _describe_implausible(self, implausible: ImplausibleValues, position: int | slice) -> str:
        """Return an error message about implausible values with their level, their time and their first location."""
        levels = self.rules.levels
        level_and_time = ""
        # A variable without levels has the single level None.
        if levels[0] is not None or len(levels) > 1:
            level_and_time = f", level {levels[implausible.level_index]:g}"
        if self.times is not None and self.calendar is not None:
            time_index = 0
            if "time" in self.dims and isinstance(position, slice):
                time_index = position.start + implausible.index[0]
            elif "time" in self.dims:
                time_index = position
            level_and_time += f" at {self.calendar.format(self.times[time_index])}"
        # The cells are in the order of the file, and the coordinates are in the order of `grid`.
        cells = self.axis_order.apply(implausible.cells)
        row, column = np.argwhere(cells)[0]
        location = f"latitude {self.grid.lat[row]:g}, longitude {self.grid.lon[column]:g}"
        return f"{self.origin}{level_and_time}: {self.rules.describe(implausible, location)}"

    def _read_and_unpack(self, dataset: xr.Dataset, position: int | slice, levels: slice) -> np.ndarray:
        """Read and unpack the values of a slice of levels, ([T,] levels, h, w) in the order of the file.

        Args:
            dataset: the open file.
            position: index of a time in the file, or a slice of T times.
            levels: slice of `level_indices`; ignored for a 2-D variable, whose result has one level.
        """
        variable = dataset.variables[self.name]
        # Dimensions without a role have length 1.
        index: dict[str, object] = {dim: 0 for dim in variable.dims if dim not in self.dims.values()}
        if "time" in self.dims:
            index[self.dims["time"]] = position
        has_levels = self.level_indices is not None and "level" in self.dims
        if has_levels:
            # netCDF reads only increasing indices; `inverse` restores the order of the levels.
            increasing_rows, inverse = np.unique(self.level_indices[levels], return_inverse=True)
            index[self.dims["level"]] = increasing_rows
        selected = variable.isel(index)
        ordered_dims = [self.dims[role] for role in ("time", "level", "lat", "lon") if role in self.dims]
        # An index of a single time removes the time dimension.
        remaining_dims = [dim for dim in ordered_dims if dim in selected.dims]
        values = selected.transpose(*remaining_dims).values
        if has_levels:
            values = values[..., inverse, :, :]
        else:
            # A 2-D variable gets an axis of one level.
            values = values[..., None, :, :]
        # A file without a time dimension has one field, which is returned for any slice.
        if isinstance(position, slice) and "time" not in self.dims:
            return values[None]
        return values
