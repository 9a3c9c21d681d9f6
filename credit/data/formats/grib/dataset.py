"""Reader of GRIB files, editions 1 and 2, as datasets with CF coordinates.

Each variable of the dataset has the dimensions (time, [level,] latitude, longitude); time is the valid time. A GRIB
file can contain a variable several times (on levels of several types, as mean and as instantaneous value, for several
members). For such a variable, the dataset contains a placeholder without values. The placeholder's encoding contains an
`UnreadableReason`. The reason is reported as an error only if the variable is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from credit.calendar import TIME_UNITS
from credit.data.formats.grib.messages import (
    SELECTION_KEYS,
    GribGrid,
    Message,
    read_coefficients,
    read_messages,
    read_values,
)
from credit.data.formats.grib.unreadable import (
    LEVEL_ATTRIBUTES,
    UNREADABLE,
    build_unreadable_reason,
    find_level_type,
    find_level_value,
    find_problem,
    is_selected,
)
from credit.data.formats.select import Value, format_values
from credit.errors import ConfigError, DataError, did_you_mean

# Key in the encoding of a variable on levels. The value is a mask (times, levels), True where there is no message.
ABSENT = "absent"
# Key in the encoding of the dataset. The value lists the variables of the file that `select` excludes.
LEFT_OUT = "left_out"


def open_grib(path: Path, select: Mapping[str, Value]) -> xr.Dataset:
    """Open a GRIB file as a dataset. Fields are read when they are accessed.

    The dataset keeps no file open and can be pickled. This function reads the entire file once.

    Args:
        path: path of the file.
        select: GRIB key -> value that a message must have. Messages without the key are also used.

    Returns:
        Dataset with float32 variables in the units of the file, and times in minutes since 1900 (`TIME_UNITS`).

    Raises:
        DataError: if the file cannot be read, or no message has a selected value.
        ConfigError: if messages cannot be selected by a key of `select`.
    """
    # All messages of a parameter form one variable.
    all_messages = read_messages(path)
    messages = _select_messages(all_messages, select, str(path))
    messages_by_variable: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        messages_by_variable[message.parameter.name].append(message)
    builder = _DatasetBuilder(path)
    for name in messages_by_variable:
        builder.add_variable(name, messages_by_variable)
    # A variable can also be read under its CF name and its paramId, unless a different variable has this name.
    for name, variable_messages in messages_by_variable.items():
        for alias in variable_messages[0].parameter.aliases:
            builder.variables.setdefault(alias, builder.variables[name])
    # Each message on model levels contains the coefficients of all levels, so the first message is enough.
    for message in messages:
        if find_level_type(message) == "hybrid":
            builder.add_coefficients(message)
            break
    # Errors about a missing variable report if the selection excludes the variable.
    dataset = xr.Dataset(builder.variables)
    dataset.encoding[LEFT_OUT] = sorted(_list_names(all_messages) - _list_names(messages))
    return dataset


def _list_names(messages: Sequence[Message]) -> set[str]:
    """Return the names of the variables of some messages, including their aliases."""
    names = set()
    for message in messages:
        names.add(message.parameter.name)
        names.update(message.parameter.aliases)
    return names


def _select_messages(messages: list[Message], select: Mapping[str, Value], origin: str) -> list[Message]:
    """Return the messages that match a selection. `open_grib` describes `select` and the errors."""
    for key, selected in select.items():
        values = {message.key_values[key] for message in messages if key in message.key_values}
        if not values:
            if key in SELECTION_KEYS:
                raise DataError(f"{origin}: data.sources.N.select names {key}, which no message has; remove it")
            level_types = {str(message.key_values["typeOfLevel"]) for message in messages}
            hint = did_you_mean(key, {*SELECTION_KEYS, *level_types})
            raise ConfigError(f"{origin}: data.sources.N.select names {key}{hint}")
        if not any(is_selected(key, value, selected) for value in values):
            raise DataError(
                f"{origin}: data.sources.N.select: {key} {selected} is not in the file; the file has "
                f"{format_values(sorted(values))}"
            )
        # A message without the key is not excluded.
        taken_messages = []
        for message in messages:
            if key not in message.key_values or is_selected(key, message.key_values[key], selected):
                taken_messages.append(message)
        messages = taken_messages
    return messages


class _DatasetBuilder:
    """Builder of the variables of a dataset from messages. Variables with equal coordinates share one coordinate.

    Args:
        path: path of the file.

    Attributes:
        variables: name -> variable or coordinate, for all that have been added.
    """

    def __init__(self, path: Path) -> None:
        self.variables: dict[str, xr.Variable] = {}
        self._path = path
        # (Kind, values, bounds) of a coordinate -> name in the dataset.
        self._coordinate_names: dict[tuple[str, bytes, bytes], str] = {}

    def add_variable(self, name: str, messages_by_variable: Mapping[str, Sequence[Message]]) -> None:
        """Add a variable of the file, and its coordinates if the dataset does not contain them yet.

        Args:
            name: name of the variable.
            messages_by_variable: name of a variable -> its messages, for each variable of the file.
        """
        messages = messages_by_variable[name]
        first_message = messages[0]
        attributes = dict(first_message.parameter.attributes)
        # If the messages do not form one variable, add a placeholder with the reason.
        problem, keys = find_problem(messages)
        if problem is not None:
            placeholder = np.empty((0, 0), np.float32)
            encoding = {UNREADABLE: build_unreadable_reason(problem, keys, name, messages_by_variable)}
            self.variables[name] = xr.Variable(("nothing", "nowhere"), placeholder, attributes, encoding)
            return
        if first_message.cell_methods is not None:
            attributes["cell_methods"] = first_message.cell_methods
        # Index of the message at each time and level; -1 where there is no message.
        times, time_index = _index_times(messages)
        levels, level_index = np.unique([find_level_value(message) for message in messages], return_inverse=True)
        message_table = np.full((len(times), len(levels)), -1)
        message_table[time_index, level_index] = np.arange(len(messages))
        dims = [self._add_time(times, messages, message_table)]
        level_type = find_level_type(first_message)
        if level_type in LEVEL_ATTRIBUTES:
            dims.append(self._add_coordinate(level_type, levels, LEVEL_ATTRIBUTES[level_type]))
        else:
            message_table = message_table[:, 0]
        dims.append(self._add_coordinate("latitude", first_message.grid.lat, {"units": "degrees_north"}))
        dims.append(self._add_coordinate("longitude", first_message.grid.lon, {"units": "degrees_east"}))
        # Values are read lazily; the encoding describes packing, as for netCDF files, and absent messages.
        fields = _Fields(self._path, name, messages, message_table)
        packing_step = max(message.packing_step for message in messages)
        encoding: dict[str, object] = {}
        if packing_step:
            encoding = {"dtype": np.dtype(np.int32), "scale_factor": packing_step}
        is_absent = message_table < 0
        if is_absent.any():
            encoding[ABSENT] = is_absent
        self.variables[name] = xr.Variable(dims, indexing.LazilyIndexedArray(fields), attributes, encoding)

    def add_coefficients(self, message: Message) -> None:
        """Add the hybrid coefficients of the half levels, under ECMWF's netCDF names ``hyai`` and ``hybi``.

        Args:
            message: message on model levels; nothing is added if the message does not contain the coefficients.
        """
        coefficients = read_coefficients(self._path, message)
        if coefficients is not None:
            a, b = coefficients
            self.variables["hyai"] = xr.Variable(("half_level",), a, {"units": "Pa"})
            self.variables["hybi"] = xr.Variable(("half_level",), b, {"units": "1"})

    def _add_time(self, times: np.ndarray, messages: Sequence[Message], message_table: np.ndarray) -> str:
        """Add the time coordinate of a variable if the dataset does not contain it yet, and return its name.

        The coordinate has bounds if the values at all times are means or accumulations over a known window.

        Args:
            times: (times,) valid times in minutes since 1900.
            messages: messages of the variable.
            message_table: (times, levels) index in `messages` of the field at each time and level; -1 if there is no
                message.
        """
        attributes = {"units": TIME_UNITS, "calendar": "standard", "standard_name": "time"}
        # All levels at a time have the same window, so its length can be read from any message at this time.
        windows = [messages[row.max()].window for row in message_table]
        bounds = None
        if None not in windows:
            bounds = np.stack([times - np.array(windows), times], axis=1)
        return self._add_coordinate("time", times, attributes, bounds)

    def _add_coordinate(
        self, name: str, values: np.ndarray, attributes: Mapping[str, str], bounds: np.ndarray | None = None
    ) -> str:
        """Add a coordinate unless the dataset contains an equal coordinate, and return its name.

        Args:
            name: kind of coordinate. The first coordinate of a kind gets this name, the second ``NAME_1``, the third
                ``NAME_2`` and so on.
            values: (N,) values of the coordinate.
            attributes: attributes of the coordinate.
            bounds: (N, 2) bounds of the values; None without bounds.
        """
        # Use the bytes of arrays as keys, because arrays cannot be keys of a dictionary.
        bounds_key = b"" if bounds is None else bounds.tobytes()
        key = (name, values.tobytes(), bounds_key)
        if key not in self._coordinate_names:
            # The name of the first coordinate of a kind has no number.
            same_kind = [kind for kind, *_ in self._coordinate_names if kind == name]
            unique_name = name
            if same_kind:
                unique_name = f"{name}_{len(same_kind)}"
            self._coordinate_names[key] = unique_name
            coordinate = xr.Variable((unique_name,), values, dict(attributes))
            self.variables[unique_name] = coordinate
            if bounds is not None:
                coordinate.attrs["bounds"] = f"{unique_name}_bounds"
                self.variables[f"{unique_name}_bounds"] = xr.Variable((unique_name, "two"), bounds)
        return self._coordinate_names[key]


class _Fields(BackendArray):
    """Lazily read values of one variable, which are read message by message.

    Args:
        path: path of the file.
        name: name of the variable, for error messages.
        messages: messages of the variable, all on the same grid.
        message_table: (times,) or (times, levels) index in `messages` of each field; -1 if there is no message.
    """

    def __init__(self, path: Path, name: str, messages: Sequence[Message], message_table: np.ndarray) -> None:
        self._path = path
        self._name = name
        self._message_table = message_table
        # (messages, 2): offset of the message in the file, and number of the field in the message.
        self._message_positions = np.array([(message.offset, message.field_number) for message in messages])
        self._grid: GribGrid = messages[0].grid
        self.shape = (*message_table.shape, len(self._grid.lat), len(self._grid.lon))
        self.dtype = np.dtype(np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[int | slice | np.ndarray, ...]) -> np.ndarray:
        """Return float32 values, with missing values as NaN.

        Args:
            key: a separate index for each axis (orthogonal indexing): times, levels (if the variable has levels), rows
                and columns.

        Raises:
            DataError: if there is no message for a requested time and level.
        """
        message_indices = _index_each_axis(self._message_table, key[:-2])
        if (message_indices < 0).any():
            raise DataError(
                f"{self._path}: {self._name} does not have all its levels at all times; leave out the incomplete "
                "levels or times"
            )
        positions = [tuple(self._message_positions[index]) for index in message_indices.ravel()]
        points = read_values(self._path, positions)
        # Reorder the points of a message by rows and columns.
        if self._grid.order is not None:
            points = points[:, self._grid.order]
        fields = points.reshape(*message_indices.shape, *self.shape[-2:])
        all_messages = [slice(None)] * message_indices.ndim
        return _index_each_axis(fields, (*all_messages, *key[-2:]))


def _index_each_axis(array: np.ndarray, key: Sequence[int | slice | np.ndarray]) -> np.ndarray:
    """Index each axis of an array independently (orthogonal indexing); an integer removes its axis.

    Args:
        array: array of any shape.
        key: an integer, a slice or an array of indices for each of the leading axes.
    """
    # An integer removes an axis, so the last axis is indexed first: the positions of earlier axes do not change.
    for axis, index in reversed(list(enumerate(key))):
        leading_axes = [slice(None)] * axis
        array = array[(*leading_axes, index)]
    return array


def _index_times(messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
    """Collect the valid times of messages.

    Returns:
        (T,) int64 ascending valid times in minutes since 1900, and for each message the index of its time. If two
        messages have the same time and level, the time occurs twice; the reader of the sources reports such duplicates.
    """
    # Count the earlier messages with the same time and level, so that duplicates differ in this number.
    num_seen: dict[tuple[int, float], int] = defaultdict(int)
    times = []
    for message in messages:
        time_and_level = (message.minutes, find_level_value(message))
        times.append((message.minutes, num_seen[time_and_level]))
        num_seen[time_and_level] += 1
    unique_times, time_index = np.unique(np.array(times, dtype=np.int64), axis=0, return_inverse=True)
    return np.ascontiguousarray(unique_times[:, 0]), time_index
