"""Reader of a climatology in a file or a zarr store with the layout of the climatologies of WeatherBench 2.

Each variable has the dimensions ``dayofyear`` (1, 2, ... to the end of the longest year), latitude and longitude. It
may also have ``hour`` and a level. The dimensions may be in any order. Other variables, such as standard deviations,
are ignored. The expected state at a time is the field of its day of the year and its hour, as in the evaluation of
WeatherBench 2. Fields are not interpolated in time. The first of March is day 60, or day 61 in a leap year.

Letters of shapes: T hours of the day (1 if the file has no hours), C channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig
from credit.config.sections.source import SourceConfig
from credit.config.sections.verification import ClimatologyConfig
from credit.data.climatology.climatology import CACHE_BYTES, Climatology, LazyFields
from credit.data.formats.cf import Coordinates, match_levels, read_level_values
from credit.data.formats.files import expand_path, open_file
from credit.data.formats.units import Conversion, find_conversion
from credit.errors import DataError, did_you_mean
from credit.grid import AxisOrder, LatLonGrid

if TYPE_CHECKING:
    from credit.channels import Channel

logger = logging.getLogger(__name__)

# Config section of the climatology, for error messages.
_KEY = "verification.climatology"
_DAY = "dayofyear"
_HOUR = "hour"
_DAYS_IN_LONGEST_YEAR = {"360_day": 360, "noleap": 365}
# A warning is logged if a chunk of the file has more days than this.
_MAX_CHUNK_DAYS = 31


def load_climatology(
    conf: ClimatologyConfig,
    data: DataConfig,
    channels: Sequence[Channel],
    calendar: Calendar,
    attributes: Mapping[str, Mapping[str, str]],
    grid: LatLonGrid | None,
) -> tuple[Climatology, LatLonGrid]:
    """Open the climatology of ``verification.climatology.path``. Its fields are read when they are accessed.

    Args:
        conf: section ``verification.climatology``, with the path and the names of variables in the file.
        data: the ``data`` section of the config, from which names of variables in files and units of levels are used.
        channels: (C,) channels to load; the file must contain the variable and the level of each channel.
        calendar: calendar of the times at which the climatology is evaluated.
        attributes: variable name -> attributes in the data; fields of the file are converted to the units of the data.
        grid: grid that the file must have, with rows and columns in any order; None if the caller regrids the fields.

    Returns:
        The climatology and the grid of its fields.

    Raises:
        DataError: if the file lacks a variable, dimension or level, or does not match the grid, the units or the
            calendar; the message names the file and the problem.
    """
    paths = expand_path(conf.path, f"{_KEY}.path")
    if len(paths) > 1:
        raise DataError(f"{_KEY}.path: {conf.path} matches {len(paths)} files; name one file with every variable")
    path = paths[0]
    dataset = open_file(path, SourceConfig(path=str(path), storage_options=conf.storage_options))
    file = _ClimatologyFile(dataset, str(path), conf, data, attributes)
    num_days = file.count_days(calendar.name)
    day_minutes = file.read_day_minutes()
    rows_of_variable: dict[str, list[int]] = {}
    for row, channel in enumerate(channels):
        rows_of_variable.setdefault(channel.variable, []).append(row)
    variables = [file.find_variable(name, rows, channels) for name, rows in rows_of_variable.items()]
    # All variables must be on the same grid, which must be the grid of the data.
    file_grid = variables[0].grid
    for variable in variables:
        mismatch = file_grid.describe_mismatch(variable.grid)
        if mismatch:
            raise DataError(f"{path}: its variables are on different grids: {mismatch}")
    mismatch = grid.describe_mismatch(file_grid) if grid is not None else None
    if mismatch:
        raise DataError(
            f"{path}: its grid is not the grid of the data: {mismatch}; set verification.grid to regrid both, or name "
            f"a file on the grid of the data ({_KEY}.path)"
        )
    shape = (max(1, len(day_minutes)), num_days, len(channels), *file_grid.shape)
    climatology = Climatology(
        names=tuple(channel.name for channel in channels),
        calendar=calendar.name,
        kind="days",
        fields=_open_fields(shape, variables, str(path)),
        day_minutes=day_minutes,
        description=f"file {Path(str(path)).name}",
        years=float("nan"),
    )
    return climatology, file_grid


@dataclass(frozen=True)
class _FileVariable:
    """Variable of the climatology file.

    Attributes:
        variable: xarray variable, whose values are read lazily.
        dims: names of the dimensions for level (if the variable has levels), latitude and longitude, in this order.
        level_indices: increasing indices in the file of the levels to read; None for a variable without levels.
        channel_indices: indices in the channels of the climatology, one for each level that is read.
        grid: grid of the file.
        axis_order: reordering of rows and columns of the file into the order of `grid`.
        conversion: conversion to the units of the data; None if the file has these units, or if units are unknown.
    """

    variable: xr.Variable
    dims: tuple[str, ...]
    level_indices: np.ndarray | None
    channel_indices: list[int]
    grid: LatLonGrid
    axis_order: AxisOrder
    conversion: Conversion | None

    def read(self, hour: int, day: int | slice) -> np.ndarray:
        """Read fields of this variable, float32 in the units of the data.

        Args:
            hour: index of the hour of the day in the file; ignored if the variable has no hours.
            day: index of the day of the year (0 is the first of January), or a slice of such indices.

        Returns:
            (levels, H, W) for one day or (days, levels, H, W) for a slice; a variable without levels has one level.
        """
        # xarray selects along all dimensions at once, so only the requested chunks are read.
        index: dict[str, object] = {_DAY: day}
        if _HOUR in self.variable.dims:
            index[_HOUR] = hour
        if self.level_indices is not None:
            index[self.dims[0]] = self.level_indices
        # A slice keeps the dimension of the days, which is the first; an index drops it.
        day_dims = [_DAY] if isinstance(day, slice) else []
        values = self.variable.isel(index).transpose(*day_dims, *self.dims).values
        if self.level_indices is None:
            # A variable without levels has one channel.
            values = values[..., None, :, :]
        values = self.axis_order.apply(values)
        if self.conversion is None:
            return np.float32(values)
        return self.conversion.apply(values)


class _ClimatologyFile:
    """Reader of the days, hours and variables of the climatology file.

    Args:
        dataset: dataset of the open file, whose values are read lazily.
        path: path of the file, for error messages.
        conf: section ``verification.climatology``.
        data: the ``data`` section of the config.
        attributes: variable name -> attributes in the data.
    """

    def __init__(
        self,
        dataset: xr.Dataset,
        path: str,
        conf: ClimatologyConfig,
        data: DataConfig,
        attributes: Mapping[str, Mapping[str, str]],
    ) -> None:
        self._dataset = dataset
        self._path = path
        self._conf = conf
        self._data = data
        self._attributes = attributes
        self._coordinates = Coordinates(dataset)

    def count_days(self, calendar_name: str) -> int:
        """Return the number of days of the year in the file.

        Args:
            calendar_name: name of the CF calendar of the data.

        Raises:
            DataError: if the file has no coordinate with days 1, 2, ..., if the days end before the longest year of the
                calendar, or if the calendar has 360 days and the file has a different number.
        """
        longest = _DAYS_IN_LONGEST_YEAR.get(calendar_name, 366)
        values = self._read_coordinate(_DAY)
        if values is None or not np.array_equal(values, np.arange(1, len(values) + 1)):
            if values is None:
                present = "no such coordinate"
            else:
                present = f"{values[0]:g} to {values[-1]:g}, {len(values)} values"
            raise DataError(
                f"{self._path}: a climatology needs the coordinate {_DAY}, 1, 2, ... {longest}, but has {present}; in "
                "a file with times, group them: dataset.groupby('time.dayofyear').mean() of xarray"
            )
        # A file with 366 days can be used for a calendar without leap years, but not for a calendar of 360 days.
        is_too_short = len(values) < longest
        is_other_calendar = longest == 360 and len(values) != longest
        if is_too_short or is_other_calendar:
            raise DataError(
                f"{self._path}: {_DAY} has {len(values)} days, but the longest year of the data's calendar, "
                f"{calendar_name}, has {longest}; use a climatology of that calendar ({_KEY}.path)"
            )
        return len(values)

    def read_day_minutes(self) -> np.ndarray:
        """Return the hours of the day in the file, (T,) int64 in minutes after 0 UTC; empty without hours."""
        hours = self._read_coordinate(_HOUR)
        if hours is None:
            return np.empty(0, dtype=np.int64)
        return np.rint(hours * 60.0).astype(np.int64)

    def find_variable(self, name: str, channel_indices: list[int], channels: Sequence[Channel]) -> _FileVariable:
        """Find a variable in the file, and the levels of the variable that the channels need.

        Args:
            name: name of the variable in the run.
            channel_indices: indices in `channels` of the channels of this variable.
            channels: all channels of the climatology.

        Raises:
            DataError: if the file does not contain the variable with the required dimensions, levels and units.
        """
        name_in_file = self._find_name_in_file(name)
        variable = self._dataset.variables[name_in_file]
        dims = self._find_dims(name_in_file)
        if _HOUR in variable.dims and self._read_coordinate(_HOUR) is None:
            raise DataError(
                f"{self._path}: {name_in_file} has the dimension {_HOUR}, but no coordinate with the hours; add "
                f"the coordinate in hours of the day, UTC: dataset.assign_coords({_HOUR}=[0, 6, 12, 18]) of xarray"
            )
        # Find the levels in the file. Both or none of the channel and the variable in the file must have levels.
        levels = [channels[index].level for index in channel_indices]
        level_indices = None
        if "level" in dims and levels[0] is not None:
            coordinate = self._coordinates.role_and_name_by_dim[dims["level"]][1]
            level_units = self._data.level_units
            levels_in_file = read_level_values(self._dataset.variables[coordinate], coordinate, level_units, self._path)
            level_indices = np.asarray(match_levels(levels_in_file, levels, name, level_units, self._path))
            # netCDF reads only increasing indices, so the channels are sorted in the order of levels in the file.
            order = np.argsort(level_indices)
            channel_indices = [channel_indices[number] for number in order]
            level_indices = level_indices[order]
        elif "level" in dims:
            raise DataError(
                f"{self._path}: {name_in_file} has levels, but {name} has none; name a different variable in "
                f"{_KEY}.rename"
            )
        elif levels[0] is not None:
            raise DataError(
                f"{self._path}: {name_in_file} has no levels, but {channels[channel_indices[0]].name} is on a level; "
                f"name a different variable in {_KEY}.rename"
            )
        grid, axis_order = self._coordinates.build_grid(dims["lat"], dims["lon"], self._path)
        return _FileVariable(
            variable=variable,
            dims=tuple(dims[role] for role in ("level", "lat", "lon") if role in dims),
            level_indices=level_indices,
            channel_indices=channel_indices,
            grid=grid,
            axis_order=axis_order,
            conversion=self._find_conversion(name, name_in_file),
        )

    def _find_dims(self, name_in_file: str) -> dict[str, str]:
        """Return the names of a variable's dimensions by role: ``lat``, ``lon`` and, if it has levels, ``level``.

        Raises:
            DataError: if the variable has no day of the year, latitude or longitude, or if the role of one of its
                dimensions is unknown.
        """
        # Days and hours are found by name. All other dimensions are found by role, which is the first entry of a value
        # of `role_and_name_by_dim`.
        variable = self._dataset.variables[name_in_file]
        dims: dict[str, str] = {}
        unknown_dims = []
        for dim in variable.dims:
            role = self._coordinates.role_and_name_by_dim.get(dim, (None,))[0]
            if role is not None:
                dims[role] = dim
            if role in (None, "time") and dim not in (_DAY, _HOUR):
                unknown_dims.append(dim)
        if unknown_dims or not {"lat", "lon"} <= set(dims) or _DAY not in variable.dims:
            raise DataError(
                f"{self._path}: {name_in_file} has the dimensions {', '.join(map(str, variable.dims))}; a climatology "
                f"needs {_DAY}, latitude and longitude, and may have {_HOUR} and a level; average over other "
                "dimensions, or select one position along each of them"
            )
        return dims

    def _read_coordinate(self, name: str) -> np.ndarray | None:
        """Return the values of a 1-D coordinate as float64; None if the file does not contain the coordinate."""
        variable = self._dataset.variables.get(name)
        if variable is None or variable.dims != (name,) or variable.size == 0:
            return None
        return np.asarray(variable.values, dtype=np.float64)

    def _find_name_in_file(self, name: str) -> str:
        """Return the name under which the file contains a variable of the run.

        If ``verification.climatology.rename`` lists the variable, only the name given there is tried. Otherwise, the
        name in the run is tried first, and then the names in the files of the data sources.

        Raises:
            DataError: if the file has no variable with any of these names.
        """
        if name in self._conf.rename:
            candidates = [self._conf.rename[name]]
        else:
            candidates = [name]
            for source in self._data.sources:
                if name in source.rename:
                    candidates += source.names_in_files(name)
        for candidate in candidates:
            if candidate in self._dataset.data_vars:
                return candidate
        hint = did_you_mean(candidates[-1], [str(variable) for variable in self._dataset.data_vars])
        raise DataError(
            f"{self._path}: has no variable {' or '.join(dict.fromkeys(candidates))}{hint}; {_KEY}.rename maps {name} "
            "to its name in the file"
        )

    def _find_conversion(self, name: str, name_in_file: str) -> Conversion | None:
        """Return the conversion of a variable from the units of the file to the units of the data.

        The result is None if the units are equal, or if the file or the data have no units. If the file has no units, a
        warning is logged.

        Raises:
            DataError: if the units cannot be converted.
        """
        file_units = str(self._dataset.variables[name_in_file].attrs.get("units", ""))
        data_units = str(self._attributes.get(name, {}).get("units", ""))
        if not file_units.strip():
            logger.warning(
                "%s: %s has no units; the units of the data, %s, are assumed", self._path, name_in_file, data_units
            )
            return None
        if not data_units:
            return None
        return find_conversion(file_units, data_units, name, self._path, f"the units of {name} in the data")


def _open_fields(shape: tuple[int, int, int, int, int], variables: Sequence[_FileVariable], path: str) -> LazyFields:
    """Return the lazily read fields of the climatology.

    If the complete climatology fits into the cache, the first access to an hour of the day reads all days at this hour.
    Otherwise each day is read when it is accessed.

    Args:
        shape: (T, days, C, H, W), shape of the fields.
        variables: variables of the file, which together contain all channels.
        path: path of the file, for error messages.
    """
    _, num_days, *shape_per_day = shape

    def read_fields(hour: int, day: int | slice) -> np.ndarray:
        leading_shape = (num_days,) if isinstance(day, slice) else ()
        fields = np.empty((*leading_shape, *shape_per_day), dtype=np.float32)
        try:
            for variable in variables:
                fields[..., variable.channel_indices, :, :] = variable.read(hour, day)
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error}); copy it again") from error
        return fields

    if 4 * math.prod(shape) <= CACHE_BYTES:
        # Reading all days of an hour at once reads each chunk once.
        @cache
        def read_hour(hour: int) -> np.ndarray:
            return read_fields(hour, slice(None))

        return LazyFields(shape, lambda hour, day: read_hour(hour)[day])
    # Reading day by day reads each chunk again for each of its days, so chunks with many days are slow.
    chunk_days = 1
    for variable in variables:
        chunks = variable.variable.encoding.get("preferred_chunks", {})
        chunk_days = max(chunk_days, chunks.get(_DAY, 1))
    if chunk_days > _MAX_CHUNK_DAYS:
        logger.warning(
            "%s: a chunk contains %d days of the year, and all are read for each day; chunks of one day are faster",
            path,
            chunk_days,
        )
    return LazyFields(shape, read_fields)
