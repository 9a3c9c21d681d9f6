"""Time series of variables over several files.

Letters of shapes: H and W rows and columns of the grid of the run, h and w rows and columns of the grid of a file.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar
from credit.data.formats.files import OpenFiles, build_file_key
from credit.data.formats.select import format_values
from credit.data.formats.units import is_convertible, is_same_unit
from credit.data.sources.file_scanner import FileVariable
from credit.data.sources.reading.file_reads import read_file_variable
from credit.errors import DataError

logger = logging.getLogger(__name__)

# Standard name in netCDF files of ECMWF for variables that have no CF standard name.
_NO_STANDARD_NAME = "unknown"
# Largest number of common times at which the fields of two files are compared.
_MAX_COMPARED = 8


class SourceOverlapError(DataError):
    """Error that two sources have the same variables at the same times.

    Attributes:
        names: names of the variables.
        message_end: part of the message that follows the names and "is" or "are".
    """

    def __init__(self, names: list[str], message_end: str) -> None:
        verb = "is" if len(names) == 1 else "are"
        super().__init__(f"{format_values(names)} {verb} {message_end}")
        self.names = names
        self.message_end = message_end


@dataclass(frozen=True)
class VariableSeries:
    """Time series of one variable over all its files.

    Attributes:
        file_variables: the variable in each of its files.
        times: (N,) int64 minutes since 1900, increasing.
        file_index: (N,) int64, for each time the index in `file_variables` of the file that contains the time.
        position: (N,) int64, for each time its index along the time axis of this file.
    """

    file_variables: list[FileVariable]
    times: np.ndarray
    file_index: np.ndarray
    position: np.ndarray

    def is_from_files(self, keys: Collection[str]) -> np.ndarray:
        """Return (N,) bool, True at the times that are read from one of the given files.

        Args:
            keys: keys of the files, see `credit.data.formats.files.build_file_key`.
        """
        is_given = [build_file_key(file_variable.path) in keys for file_variable in self.file_variables]
        return np.array(is_given, dtype=bool)[self.file_index]

    def read(self, files: OpenFiles, indices: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the fields of each requested time, (levels or 1, H, W) on the grid and in the units of the run.

        Args:
            files: cache that opens the files.
            indices: increasing indices in `times`.

        Raises:
            DataError: if a file cannot be read, or its values are implausible.
        """
        return self._read(files, indices, on_file_grid=False)

    def read_on_file_grid(self, files: OpenFiles, indices: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the fields of each requested time in SI units, (levels or 1, h, w) on the grid of the file.

        These fields are inputs of formulas. The arguments and errors are described at `read`.
        """
        return self._read(files, indices, on_file_grid=True)

    def _read(self, files: OpenFiles, indices: np.ndarray, on_file_grid: bool) -> Iterator[np.ndarray]:
        """Yield the fields of each requested time.

        If `on_file_grid` is True, the result is that of `read_on_file_grid`. Otherwise it is that of `read`.

        Adjacent times are read at once. Times in the same chunk of a file are also read at once, together with the
        times between them, because the library decompresses the complete chunk anyway.
        """
        file_index = self.file_index[indices]
        position = self.position[indices]
        times_per_chunk = np.array([file_variable.layout.times_per_chunk for file_variable in self.file_variables])
        chunk = position // times_per_chunk[file_index]
        is_same_file = np.diff(file_index) == 0
        is_adjacent = np.diff(position) == 1
        is_same_chunk = np.diff(chunk) == 0
        is_read_together = is_same_file & (is_adjacent | is_same_chunk)
        for rows in np.split(np.arange(len(indices)), np.flatnonzero(~is_read_together) + 1):
            # A file may have its times in descending order.
            first = int(position[rows].min())
            last = int(position[rows].max())
            file_variable = self.file_variables[file_index[rows[0]]]
            fields = read_file_variable(files, file_variable, slice(first, last + 1), on_file_grid)
            for file_position in position[rows]:
                yield fields[file_position - first]


@dataclass(frozen=True)
class JoinedSeries(VariableSeries):
    """Time series of one variable from several sources that have different times.

    Attributes:
        source_series: the series of each source.
        series_index: (N,) int64, for each time the index in `source_series` of the series that contains the time.
        index_in_series: (N,) int64, for each time its index in this series.
    """

    source_series: list[VariableSeries]
    series_index: np.ndarray
    index_in_series: np.ndarray

    def is_from_files(self, keys: Collection[str]) -> np.ndarray:
        """Return (N,) bool, True at the times that are read from one of the given files; see `VariableSeries`."""
        is_from_files = np.zeros(len(self.times), dtype=bool)
        for number, series in enumerate(self.source_series):
            is_in_series = self.series_index == number
            is_from_files[is_in_series] = series.is_from_files(keys)[self.index_in_series[is_in_series]]
        return is_from_files

    def _read(self, files: OpenFiles, indices: np.ndarray, on_file_grid: bool) -> Iterator[np.ndarray]:
        """Yield the fields of each requested time from the source that has the time; see `VariableSeries._read`."""
        series_index = self.series_index[indices]
        index_in_series = self.index_in_series[indices]
        # Adjacent times of one series are read together.
        for rows in np.split(np.arange(len(indices)), np.flatnonzero(np.diff(series_index)) + 1):
            # If `indices` is empty, there is one empty group.
            if len(rows):
                series = self.source_series[series_index[rows[0]]]
                # A derived series overrides `read`, so `_read` of the part is not called directly.
                read = series.read_on_file_grid if on_file_grid else series.read
                yield from read(files, index_in_series[rows])


def group_by_source(file_variables: list[FileVariable]) -> list[list[FileVariable]]:
    """Return the files of a variable grouped by source, with the sources in the order of the config."""
    variables_of_source: dict[int, list[FileVariable]] = {}
    for file_variable in file_variables:
        variables_of_source.setdefault(file_variable.source_number, []).append(file_variable)
    return [variables_of_source[number] for number in sorted(variables_of_source)]


def join_series(name: str, source_series: list[VariableSeries], calendar: Calendar) -> VariableSeries:
    """Join the time series of a variable from several sources into one series; return a single series unchanged.

    Args:
        name: name of the variable, for error messages.
        source_series: the series of the variable, one for each source.
        calendar: calendar of the times, for error messages.

    Raises:
        SourceOverlapError: if two sources have the variable at the same time.
    """
    if len(source_series) == 1:
        return source_series[0]
    # The times of all series are concatenated and sorted, together with the indices of their series.
    times = np.concatenate([series.times for series in source_series])
    order = np.argsort(times, kind="stable")
    lengths = [len(series.times) for series in source_series]
    series_index = np.repeat(np.arange(len(source_series)), lengths)[order]
    index_in_series = np.concatenate([np.arange(len(series.times)) for series in source_series])[order]
    times = times[order]
    repeated = np.flatnonzero(np.diff(times) == 0)
    if len(repeated):
        first_repeated = repeated[0]
        first_series = source_series[series_index[first_repeated]]
        second_series = source_series[series_index[first_repeated + 1]]
        raise _build_overlap_error(name, first_series, second_series, calendar)
    # The files of all series get consecutive indices.
    file_variables: list[FileVariable] = []
    file_indices = []
    for series in source_series:
        file_indices.append(series.file_index + len(file_variables))
        file_variables += series.file_variables
    file_index = np.concatenate(file_indices)[order]
    position = np.concatenate([series.position for series in source_series])[order]
    return JoinedSeries(file_variables, times, file_index, position, source_series, series_index, index_in_series)


def _build_overlap_error(
    name: str, first_series: VariableSeries, second_series: VariableSeries, calendar: Calendar
) -> SourceOverlapError:
    """Return the error for two sources with common times; its message proposes a period without overlap."""
    # The source that ends later could begin after the end of the source that ends earlier.
    shared_times = np.intersect1d(first_series.times, second_series.times)
    early, late = sorted((first_series, second_series), key=lambda series: int(series.times[-1]))
    early_number = early.file_variables[0].source_number
    late_number = late.file_variables[0].source_number
    advice = "list the variables of each source in data.sources.N.variables"
    remaining_times = late.times[late.times > early.times[-1]]
    if len(remaining_times):
        first = calendar.format(remaining_times[0])
        last = calendar.format(remaining_times[-1])
        period = f'data.sources.{late_number}.period: ["{first}", "{last}"]'
        advice = f"begin one source where the other source ends ({period}), or {advice}"
    return SourceOverlapError(
        [name],
        f"in data.sources {early_number} and {late_number} at the same {len(shared_times)} times, from "
        f"{calendar.format(shared_times[0])} to {calendar.format(shared_times[-1])}; sources may follow each other in "
        f"time, but each time must come from one source: {advice}",
    )


def build_series(
    name: str, file_variables: list[FileVariable], files: OpenFiles, calendar: Calendar, on_file_grid: bool = False
) -> VariableSeries:
    """Build the time series of a variable from its files in one source.

    If two files contain the same time, their fields must be equal; the first file is used.

    Args:
        name: name of the variable, for error messages.
        file_variables: the variable in each of its files.
        files: cache that opens the files.
        calendar: calendar of the times, for error messages.
        on_file_grid: True to compare the fields of two files on the grid of the files, False on the grid of the run.

    Raises:
        DataError: if a file has no time axis or contains a time twice, or if two files differ at the same time.
    """
    # Concatenate the times of all files, then sort them.
    for file_variable in file_variables:
        if file_variable.layout.times is None:
            raise DataError(f"{file_variable.path}: {name} has no time axis in the file; add one, or list it as static")
    times = np.concatenate([file_variable.times for file_variable in file_variables])
    if not len(times):
        raise DataError(
            f"data.sources.{file_variables[0].source_number}: period, every and the attributes valid_time_start and "
            f"valid_time_stop of its files exclude all times of {name}; {_describe_span(file_variables, calendar)}"
        )
    lengths = [len(file_variable.times) for file_variable in file_variables]
    file_index = np.repeat(np.arange(len(file_variables)), lengths)
    position = np.concatenate([file_variable.positions for file_variable in file_variables])
    order = np.argsort(times, kind="stable")
    series = VariableSeries(file_variables, times[order], file_index[order], position[order])
    # If several files contain a time, the first file is used, because the sort is stable.
    repeated = np.flatnonzero(np.diff(series.times) == 0) + 1
    _require_equal_fields(name, series, repeated, files, calendar, on_file_grid)
    unique = np.setdiff1d(np.arange(len(times)), repeated)
    return VariableSeries(file_variables, series.times[unique], series.file_index[unique], series.position[unique])


def _describe_span(file_variables: list[FileVariable], calendar: Calendar) -> str:
    """Return a phrase with the first and the last time in the files of a variable, including unused times."""
    times = np.concatenate([file_variable.layout.times for file_variable in file_variables])
    return f"its files have {calendar.format(times.min())} to {calendar.format(times.max())}"


def _require_equal_fields(
    name: str, series: VariableSeries, repeated: np.ndarray, files: OpenFiles, calendar: Calendar, on_file_grid: bool
) -> None:
    """Raise DataError if a file contains a time twice, or if two files have different fields at the same time.

    The fields are compared at only a few of the repeated times.

    Args:
        name: name of the variable.
        series: series of the variable, in which times may be repeated.
        repeated: indices of the times that are equal to the previous time.
        files: cache that opens the files.
        calendar: calendar of the times, for error messages.
        on_file_grid: see `build_series`.
    """
    if len(repeated) == 0:
        return
    for index in repeated:
        if series.file_index[index] == series.file_index[index - 1]:
            path = series.file_variables[series.file_index[index]].path
            raise DataError(f"{path}: {calendar.format(series.times[index])} occurs twice ({name}); remove one")
    # A few fields, evenly distributed over all repeated times, show whether the files contain the same data.
    compared = np.unique(np.linspace(0, len(repeated) - 1, _MAX_COMPARED).astype(int))
    for index in repeated[compared]:
        earlier_file = series.file_variables[series.file_index[index - 1]]
        later_file = series.file_variables[series.file_index[index]]
        earlier_fields = read_file_variable(files, earlier_file, int(series.position[index - 1]), on_file_grid)
        later_fields = read_file_variable(files, later_file, int(series.position[index]), on_file_grid)
        if not np.array_equal(earlier_fields, later_fields, equal_nan=True):
            raise DataError(
                f"{name} at {calendar.format(series.times[index])} differs between {earlier_file.path} and "
                f"{later_file.path}; name only one of them in data.sources"
            )
    logger.info("%s: %d times are in two files with equal fields; the first file is used", name, len(repeated))


def merge_attributes(name: str, file_variables: list[FileVariable], temporal: str) -> dict[str, str]:
    """Return the attributes of a variable for the run, which are copied from its first file.

    Args:
        name: name of the variable, for error messages.
        file_variables: the variable in each of its files, which must have the same units.
        temporal: ``data.variable_options.NAME.temporal``.

    Returns:
        ``units``, ``standard_name``, ``long_name`` and, unless the variable is instantaneous, ``temporal``.

    Raises:
        DataError: if the units in two files differ; the message names both files.
    """
    first = file_variables[0].layout.attributes
    for file_variable in file_variables[1:]:
        units = file_variable.layout.attributes.get("units", "")
        first_units = first.get("units", "")
        if not is_same_unit(units, first_units):
            advice = f"set data.variable_options.{name}.units to the unit to which all files should be converted"
            if not is_convertible(units, first_units):
                advice = (
                    "these are units of different quantities: name the variable with the right quantity "
                    f"(data.sources.N.rename), remove {name} from one source (data.sources.N.variables), or correct "
                    "the units in the file"
                )
            raise DataError(
                f'{name} is in "{first_units}" in {file_variables[0].path} and in "{units}" in {file_variable.path}; '
                f"{advice}"
            )
    _warn_of_different_standard_names(name, file_variables)
    attributes = {key: value for key, value in first.items() if key != "cell_methods"}
    if temporal != "instant":
        attributes["temporal"] = "accumulate" if temporal == "deaccumulate" else temporal
    return attributes


def _warn_of_different_standard_names(name: str, file_variables: list[FileVariable]) -> None:
    """Log a warning if a variable has different standard names in two files, which may be different variables."""
    first_file_of_name: dict[str, FileVariable] = {}
    for file_variable in file_variables:
        standard_name = file_variable.layout.attributes.get("standard_name", _NO_STANDARD_NAME)
        if standard_name not in ("", _NO_STANDARD_NAME):
            first_file_of_name.setdefault(standard_name, file_variable)
    if len(first_file_of_name) > 1:
        descriptions = [f"{standard} in {variable.path}" for standard, variable in first_file_of_name.items()]
        two_names = " and ".join(descriptions[:2])
        logger.warning(
            "%s is called %s; check that these are the same variable (data.sources.N.rename)", name, two_names
        )
