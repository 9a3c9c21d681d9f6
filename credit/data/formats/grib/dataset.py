"""GRIB files, editions 1 and 2, as datasets with CF coordinates, like any other file.

Each variable of the dataset is (time, [level,] latitude, longitude); time is the valid time. A GRIB file can contain a
variable several times (on levels of several types, as mean and as instantaneous value, for several members). The
dataset has such a variable without values, with an `Unreadable` that explains it: this is an error only if the variable
is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from credit.calendar import TIME_UNITS
from credit.data.formats.grib.messages import CHOICES, GribGrid, Message, read_coefficients, read_messages, read_values
from credit.data.formats.select import Value, format_values, is_same_value
from credit.errors import ConfigError, DataError, did_you_mean

# Key of the encoding of a variable that cannot be read: its `Unreadable`.
UNREADABLE = "unreadable"
# Key of the encoding of a variable on levels: (times, levels) bool, True if there is no message.
ABSENT = "absent"
# Key of the encoding of the dataset: variables of the file that `select` leaves out.
LEFT_OUT = "left_out"
_PA_PER_HPA = 100.0
# Type of level -> hPa in its unit.
_HPA_PER_UNIT = {"isobaricInhPa": 1.0, "isobaricInPa": 1.0 / _PA_PER_HPA}
_LEVEL_ATTRIBUTES = {
    "pressure": {"units": "hPa", "standard_name": "air_pressure"},
    "hybrid": {"units": "1", "standard_name": "atmosphere_hybrid_sigma_pressure_coordinate"},
}
# Messages that differ in one of these keys are different variables. Those that differ in another of the `CHOICES` are
# different variables only if they have a time and level in common.
_DISTINGUISHING_KEYS = ("typeOfLevel", "stepType", "number", "grid")
_MAX_LISTED_NAMES = 5


@dataclass(frozen=True)
class Unreadable:
    """Reason why a variable of a GRIB file cannot be read.

    Attributes:
        problem: text that follows the name of the variable.
        choices: key of ``data.sources.N.select`` -> its values in the messages of the variable; empty if no selection
            helps.
        others: other variable of the file -> the values of these keys, in their order, in each of its messages; None
            for a key that a message does not have.
    """

    problem: str
    choices: Mapping[str, Sequence[Value]]
    others: Mapping[str, frozenset[tuple[Value | None, ...]]]

    def describe(self, level_units: str | None) -> str:
        """Return the problem and what to do about it.

        Args:
            level_units: ``data.level_units`` if the variable is in vars_3D, None if it is in vars_2D.
        """
        if not self.choices:
            return self.problem
        example = {key: self._choose_value(key, values, level_units) for key, values in self.choices.items()}
        level_type = _merge_pressure_types(example.get("typeOfLevel"))
        if level_units is not None and level_type not in (None, *_LEVEL_ATTRIBUTES):
            return f"{self.problem}; none of these are pressure or model levels, as vars_3D needs: list it in vars_2D"
        if level_units is not None and not example.keys() & set(CHOICES):
            return f"{self.problem}; vars_3D needs levels: list it in vars_2D for one of these"
        selection = ", ".join(f"{key}: {format_values([value])}" for key, value in example.items())
        left_out = []
        for name, messages in self.others.items():
            if not any(_matches_selection(values, example) for values in messages):
                left_out.append(name)
        advice = f"{self.problem}; choose with data.sources.N.select: {{{selection}}}"
        if not left_out:
            return advice
        names = ", ".join(left_out[:_MAX_LISTED_NAMES])
        if len(left_out) > _MAX_LISTED_NAMES:
            names += ", ..."
        return (
            f"{advice}, in an entry of data.sources whose `variables` lists this variable only; the choice leaves out "
            f"{names}: list what you need of these in `variables` of another entry with the same path"
        )

    @staticmethod
    def _choose_value(key: str, values: Sequence[Value], level_units: str | None) -> Value:
        """Return the value that fits a variable on levels, or one without; the first if none fits."""
        if key != "typeOfLevel":
            return values[0]
        preferred_types = {None: (), "model_level": ("hybrid", "pressure")}.get(level_units, ("pressure", "hybrid"))
        for level_type in preferred_types:
            for value in values:
                if _merge_pressure_types(value) == level_type:
                    return value
        for value in values:
            if _merge_pressure_types(value) not in _LEVEL_ATTRIBUTES:
                return value
        return values[0]


def _matches_selection(values: Sequence[Value | None], selection: Mapping[str, Value]) -> bool:
    """Return whether a message with these values of the selected keys is taken; messages without a key are."""
    for value, (key, selected) in zip(values, selection.items(), strict=True):
        if value is not None and not _is_selected(key, value, selected):
            return False
    return True


def _is_selected(key: str, value: Value, selected: Value) -> bool:
    """Return whether a value is the selected one; pressure levels in hPa and in Pa are one type."""
    if key == "typeOfLevel" and value in _HPA_PER_UNIT and selected in _HPA_PER_UNIT:
        return True
    return is_same_value(value, selected)


def open_grib(path: Path, select: Mapping[str, Value]) -> xr.Dataset:
    """Return a GRIB file as a dataset; fields are read when they are needed.

    The dataset keeps no file open and can be pickled. Opening reads the whole file once.

    Args:
        path: the file.
        select: GRIB key -> the value of the messages to take; messages without the key are taken.

    Raises:
        DataError: for a file that cannot be read, or a value that no message has.
        ConfigError: for a key that cannot be selected.
    """
    all_messages = read_messages(path)
    messages = _select(all_messages, select, str(path))
    messages_of: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        messages_of[message.parameter.name].append(message)
    builder = _DatasetBuilder(path)
    for name in messages_of:
        builder.add(name, messages_of)
    for name, variable_messages in messages_of.items():
        for alias in variable_messages[0].parameter.aliases:
            builder.variables.setdefault(alias, builder.variables[name])
    model_level_message = next((message for message in messages if _level_type(message) == "hybrid"), None)
    if model_level_message is not None:
        builder.add_coefficients(model_level_message)
    dataset = xr.Dataset(builder.variables)
    dataset.encoding[LEFT_OUT] = sorted(_list_names(all_messages) - _list_names(messages))
    return dataset


def _list_names(messages: Sequence[Message]) -> set[str]:
    """Return the names of all variables, aliases included."""
    names = set()
    for message in messages:
        names.add(message.parameter.name)
        names.update(message.parameter.aliases)
    return names


def _select(messages: list[Message], select: Mapping[str, Value], origin: str) -> list[Message]:
    for key, selected in select.items():
        values = dict.fromkeys(message.choices[key] for message in messages if key in message.choices)
        if not values:
            if key in CHOICES:
                raise DataError(f"{origin}: data.sources.N.select names {key}, but no message has it")
            level_types = {str(message.choices["typeOfLevel"]) for message in messages}
            hint = did_you_mean(key, {*CHOICES, *level_types})
            raise ConfigError(f"{origin}: data.sources.N.select names {key}{hint}")
        if not any(_is_selected(key, value, selected) for value in values):
            raise DataError(
                f"{origin}: data.sources.N.select: {key} {selected} is not there; the file has "
                f"{format_values(sorted(values))}"
            )
        messages = [
            message
            for message in messages
            if key not in message.choices or _is_selected(key, message.choices[key], selected)
        ]
    return messages


class _DatasetBuilder:
    """Combines messages to variables; variables with equal coordinates share them.

    Attributes:
        variables: name -> variable or coordinate.
    """

    def __init__(self, path: Path) -> None:
        self.variables: dict[str, xr.Variable] = {}
        self._path = path
        self._coordinate_names: dict[tuple[str, bytes, bytes], str] = {}

    def add(self, name: str, messages_of: Mapping[str, Sequence[Message]]) -> None:
        """Add one of the variables of the file; `messages_of` has the messages of all."""
        messages = messages_of[name]
        first_message = messages[0]
        attributes = dict(first_message.parameter.attributes)
        problem, keys = _find_problem(messages)
        if problem is not None:
            placeholder = np.empty((0, 0), np.float32)
            encoding = {UNREADABLE: _build_unreadable(problem, keys, name, messages_of)}
            self.variables[name] = xr.Variable(("nothing", "nowhere"), placeholder, attributes, encoding)
            return
        if first_message.cell_methods is not None:
            attributes["cell_methods"] = first_message.cell_methods
        times, time_index = _index_times(messages)
        levels, level_index = np.unique([_level(message) for message in messages], return_inverse=True)
        message_table = np.full((len(times), len(levels)), -1)
        message_table[time_index, level_index] = np.arange(len(messages))
        dims = [self._add_time(times, messages, message_table)]
        level_type = _level_type(first_message)
        if level_type in _LEVEL_ATTRIBUTES:
            dims.append(self._add_coordinate(level_type, levels, _LEVEL_ATTRIBUTES[level_type]))
        else:
            message_table = message_table[:, 0]
        dims.append(self._add_coordinate("latitude", first_message.grid.lat, {"units": "degrees_north"}))
        dims.append(self._add_coordinate("longitude", first_message.grid.lon, {"units": "degrees_east"}))
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
        """Add the coefficients of the half levels of the model, under the names of the netCDF files of ECMWF."""
        coefficients = read_coefficients(self._path, message)
        if coefficients is not None:
            a, b = coefficients
            self.variables["hyai"] = xr.Variable(("half_level",), a, {"units": "Pa"})
            self.variables["hybi"] = xr.Variable(("half_level",), b, {"units": "1"})

    def _add_time(self, times: np.ndarray, messages: Sequence[Message], message_table: np.ndarray) -> str:
        """Return the name of the time coordinate; it has bounds if all messages cover a window."""
        attributes = {"units": TIME_UNITS, "calendar": "standard", "standard_name": "time"}
        windows = [messages[row.max()].window for row in message_table]
        bounds = None
        if None not in windows:
            bounds = np.stack([times - np.array(windows), times], axis=1)
        return self._add_coordinate("time", times, attributes, bounds)

    def _add_coordinate(
        self, name: str, values: np.ndarray, attributes: Mapping[str, str], bounds: np.ndarray | None = None
    ) -> str:
        """Return the name of the coordinate with these values and bounds, which is added if there is none."""
        key = (name, values.tobytes(), b"" if bounds is None else bounds.tobytes())
        if key not in self._coordinate_names:
            number = sum(other == name for other, *_ in self._coordinate_names)
            unique_name = f"{name}_{number}" if number else name
            self._coordinate_names[key] = unique_name
            coordinate = xr.Variable((unique_name,), values, dict(attributes))
            self.variables[unique_name] = coordinate
            if bounds is not None:
                coordinate.attrs["bounds"] = f"{unique_name}_bounds"
                self.variables[f"{unique_name}_bounds"] = xr.Variable((unique_name, "two"), bounds)
        return self._coordinate_names[key]


class _Fields(BackendArray):
    """Values of one variable, read message by message.

    Args:
        path: the file.
        name: the variable, for messages.
        messages: its messages, all on one grid.
        message_table: (times,) or (times, levels) index of the message of each; -1 if there is none.
    """

    def __init__(self, path: Path, name: str, messages: Sequence[Message], message_table: np.ndarray) -> None:
        self._path = path
        self._name = name
        self._message_table = message_table
        self._offsets = np.array([(message.offset, message.field_number) for message in messages])
        self._grid: GribGrid = messages[0].grid
        self.shape = (*message_table.shape, len(self._grid.lat), len(self._grid.lon))
        self.dtype = np.dtype(np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[int | slice | np.ndarray, ...]) -> np.ndarray:
        """Return the values at the indices of times, levels, rows and columns (orthogonal indexing)."""
        numbers = _index_each_axis(self._message_table, key[:-2])
        if (numbers < 0).any():
            raise DataError(
                f"{self._path}: {self._name} does not have all its levels at all times; leave out the levels or the "
                "times that are not complete"
            )
        points = read_values(self._path, [tuple(self._offsets[number]) for number in numbers.ravel()])
        if self._grid.order is not None:
            points = points[:, self._grid.order]
        fields = points.reshape(*numbers.shape, *self.shape[-2:])
        all_messages = [slice(None)] * numbers.ndim
        return _index_each_axis(fields, (*all_messages, *key[-2:]))


def _index_each_axis(array: np.ndarray, key: Sequence[int | slice | np.ndarray]) -> np.ndarray:
    """Return an array with each axis indexed on its own; integers drop their axis."""
    # Integers drop an axis, so the last axis is indexed first: the numbers of the others do not change.
    for axis, index in reversed(list(enumerate(key))):
        array = array[(*[slice(None)] * axis, index)]
    return array


def _level_type(message: Message) -> str:
    """Return the type of level, the same for pressure in hPa and in Pa."""
    return str(_merge_pressure_types(message.choices["typeOfLevel"]))


def _merge_pressure_types(type_of_level: Value | None) -> Value | None:
    return "pressure" if type_of_level in _HPA_PER_UNIT else type_of_level


def _level(message: Message) -> float:
    return message.level * _HPA_PER_UNIT.get(str(message.choices["typeOfLevel"]), 1.0)


def _index_times(messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
    """Return the valid times and the index among them of each message.

    A time is there twice if two messages have it at one level; the reader of the sources then reports the duplicate.
    """
    num_seen: dict[tuple[int, float], int] = defaultdict(int)
    times = []
    for message in messages:
        time_and_level = (message.minutes, _level(message))
        times.append((message.minutes, num_seen[time_and_level]))
        num_seen[time_and_level] += 1
    unique_times, time_index = np.unique(np.array(times, dtype=np.int64), axis=0, return_inverse=True)
    return np.ascontiguousarray(unique_times[:, 0]), time_index


def _find_problem(messages: Sequence[Message]) -> tuple[str | None, Sequence[str]]:
    """Return why messages cannot be read as one variable (None if they can), and the keys to select by."""
    choices = [message.choices | {"typeOfLevel": _level_type(message)} for message in messages]
    differing_keys = [key for key in _DISTINGUISHING_KEYS if len({choice.get(key) for choice in choices}) > 1]
    if not differing_keys:
        differing_keys = _find_differing_keys(messages)
    if differing_keys:
        values = "; ".join(f"{key} {format_values(_list_values(key, messages))}" for key in differing_keys)
        return f"is there several times, with {values}", differing_keys
    level_type = _level_type(messages[0])
    levels = sorted({message.level for message in messages})
    if level_type not in _LEVEL_ATTRIBUTES and len(levels) > 1:
        problem = (
            f"is on several levels of the type {level_type} ({format_values(levels)}), which are neither pressure nor "
            "model levels"
        )
        return problem, [level_type]
    return messages[0].grid.problem, []


def _find_differing_keys(messages: Sequence[Message]) -> list[str]:
    """Return the `CHOICES` in which messages of one time and level differ."""
    groups: dict[tuple[int, float], list[Message]] = defaultdict(list)
    for message in messages:
        groups[message.minutes, _level(message)].append(message)
    differing_keys = []
    for key in CHOICES:
        if any(len({message.choices.get(key) for message in group}) > 1 for group in groups.values()):
            differing_keys.append(key)
    return differing_keys


def _build_unreadable(
    problem: str, keys: Sequence[str], name: str, messages_of: Mapping[str, Sequence[Message]]
) -> Unreadable:
    choices = {key: _list_values(key, messages_of[name]) for key in keys}
    others = {}
    for other_name, messages in messages_of.items():
        if other_name != name:
            values = [tuple(message.choices.get(key) for key in keys) for message in messages]
            others[other_name] = frozenset(values)
    return Unreadable(problem, choices, others)


def _list_values(key: str, messages: Sequence[Message]) -> list[Value]:
    return sorted({message.choices[key] for message in messages if key in message.choices})
