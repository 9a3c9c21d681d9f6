"""GRIB files, editions 1 and 2, as datasets with CF coordinates, like any other file.

Each variable of the dataset is (time, [level,] latitude, longitude), time being the valid time. A GRIB file may hold a
variable several times over (on surfaces of several kinds, as mean and as instantaneous value, for several members).
Such a variable stands in the dataset with an `Unreadable`, which is an error only for who wants it.
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

from credit.calendar import EPOCH
from credit.data.formats.grib_grid import GribGrid
from credit.data.formats.grib_messages import CHOICES, Message, read_coefficients, read_messages, read_values
from credit.data.formats.select import Value, listing, same_value
from credit.errors import ConfigError, DataError, did_you_mean

UNREADABLE = "unreadable"
# (times, levels) bool in the encoding of a variable on levels: where there is no message
ABSENT = "absent"
# of the dataset's encoding: the variables of the file that `select` leaves out
LEFT_OUT = "left_out"
_PA_PER_HPA = 100.0
_PRESSURE = {"isobaricInhPa": 1.0, "isobaricInPa": 1.0 / _PA_PER_HPA}
_LEVEL_ATTRIBUTES = {
    "pressure": {"units": "hPa", "standard_name": "air_pressure"},
    "hybrid": {"units": "1", "standard_name": "atmosphere_hybrid_sigma_pressure_coordinate"},
}
# messages that differ in these are different fields, whatever their times; in the others, only where times coincide
_ALWAYS_APART = ("typeOfLevel", "stepType", "number", "grid")
_MOST_NAMED = 5


@dataclass(frozen=True)
class Unreadable:
    """Why a variable of a GRIB file cannot be read as one.

    Attributes:
        problem: in words that follow the variable's name.
        choices: key of ``data.sources.N.select`` -> the variable's values of it; empty where no choice helps.
        others: each other variable of the file -> the values that its messages have of these keys, in their order,
            None where a message does not have the key.
    """

    problem: str
    choices: Mapping[str, Sequence[Value]]
    others: Mapping[str, frozenset[tuple[Value | None, ...]]]

    def describe(self, level_units: str | None) -> str:
        """Return the problem and a way out that fits what is wanted.

        Args:
            level_units: ``data.level_units`` for a variable that is wanted on levels, None for one without.
        """
        if not self.choices:
            return self.problem
        example = {key: self._choose(key, values, level_units) for key, values in self.choices.items()}
        if level_units is not None and _kind_of_type(example.get("typeOfLevel")) not in (None, *_LEVEL_ATTRIBUTES):
            return f"{self.problem}; none of these are pressure or model levels, as vars_3D needs: list it in vars_2D"
        if level_units is not None and not example.keys() & set(CHOICES):
            return f"{self.problem}; vars_3D needs levels: list it in vars_2D for one of these"
        select = ", ".join(f"{key}: {listing([value])}" for key, value in example.items())
        left_out = [name for name, held in self.others.items() if not any(_passes(own, example) for own in held)]
        advice = f"{self.problem}; choose with data.sources.N.select: {{{select}}}"
        if not left_out:
            return advice
        names = ", ".join(left_out[:_MOST_NAMED]) + (", ..." if len(left_out) > _MOST_NAMED else "")
        return (
            f"{advice}, in an entry of data.sources whose `variables` lists this variable only; the choice leaves out "
            f"{names}: list what you need of these in `variables` of another entry with the same path"
        )

    @staticmethod
    def _choose(key: str, values: Sequence[Value], level_units: str | None) -> Value:
        """Return the value that fits a variable on levels, or one without; the first where none fits."""
        if key != "typeOfLevel":
            return values[0]
        wanted = {None: (), "model_level": ("hybrid", "pressure")}.get(level_units, ("pressure", "hybrid"))
        order = [kind for kind in wanted if kind in map(_kind_of_type, values)]
        if order:
            return next(value for value in values if _kind_of_type(value) == order[0])
        return next((value for value in values if _kind_of_type(value) not in _LEVEL_ATTRIBUTES), values[0])


def _passes(values: Sequence[Value | None], example: Mapping[str, Value]) -> bool:
    """Return whether a message with these values of the keys stays where `example` is selected."""
    pairs = zip(values, example.items(), strict=True)
    return all(have is None or _is_selected(key, have, wanted) for have, (key, wanted) in pairs)


def _is_selected(key: str, have: Value, wanted: Value) -> bool:
    """Return whether a value is the selected one; pressure levels in hPa and in Pa are one type."""
    if key == "typeOfLevel" and have in _PRESSURE and wanted in _PRESSURE:
        return True
    return same_value(have, wanted)


def open_grib(path: Path, select: Mapping[str, Value]) -> xr.Dataset:
    """Return a GRIB file as a dataset; fields are read when they are asked for.

    The dataset holds no open file and can be pickled. Making it reads the whole file once.

    Args:
        path: the file.
        select: GRIB key -> the value of the messages to take; messages without the key stay.

    Raises:
        DataError: for a file that cannot be read, or a value that no message has.
        ConfigError: for a key that cannot be selected.
    """
    every_message = read_messages(path)
    messages = _select(every_message, select, str(path))
    of_variable: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        of_variable[message.parameter.name].append(message)
    builder = _Builder(path)
    for name, its_messages in of_variable.items():
        builder.add(name, its_messages, of_variable)
    for name, its_messages in of_variable.items():
        for alias in its_messages[0].parameter.aliases:
            builder.variables.setdefault(alias, builder.variables[name])
    on_model_levels = next((message for message in messages if _level_kind(message) == "hybrid"), None)
    if on_model_levels is not None:
        builder.add_coefficients(on_model_levels)
    dataset = xr.Dataset(builder.variables)
    dataset.encoding[LEFT_OUT] = sorted(_names_in(every_message) - _names_in(messages))
    return dataset


def _names_in(messages: Sequence[Message]) -> set[str]:
    parameters = {message.parameter.name: message.parameter for message in messages}.values()
    return {name for parameter in parameters for name in (parameter.name, *parameter.aliases)}


def _select(messages: list[Message], select: Mapping[str, Value], where: str) -> list[Message]:
    for key, wanted in select.items():
        have = dict.fromkeys(message.choices[key] for message in messages if key in message.choices)
        if not have:
            keys = {*CHOICES, *(str(message.choices["typeOfLevel"]) for message in messages)}
            if key in CHOICES:
                raise DataError(f"{where}: data.sources.N.select names {key}, but no message has it")
            raise ConfigError(f"{where}: data.sources.N.select names {key}{did_you_mean(key, keys)}")
        if not any(_is_selected(key, value, wanted) for value in have):
            raise DataError(
                f"{where}: data.sources.N.select: {key} {wanted} is not there; the file has {listing(sorted(have))}"
            )
        messages = [
            message
            for message in messages
            if key not in message.choices or _is_selected(key, message.choices[key], wanted)
        ]
    return messages


class _Builder:
    """Puts messages together to variables; equal coordinates are shared."""

    def __init__(self, path: Path) -> None:
        self.variables: dict[str, xr.Variable] = {}
        self._path = path
        self._names: dict[tuple[str, bytes, bytes], str] = {}

    def add(self, name: str, messages: list[Message], of_variable: Mapping[str, Sequence[Message]]) -> None:
        """Add the variable that these messages are; `of_variable` has those of the whole file."""
        first = messages[0]
        attributes = dict(first.parameter.attributes)
        problem, keys = _why_unreadable(messages)
        if problem is not None:
            nothing = np.empty((0, 0), np.float32)
            encoding = {UNREADABLE: _unreadable(problem, keys, name, of_variable)}
            self.variables[name] = xr.Variable(("nothing", "nowhere"), nothing, attributes, encoding)
            return
        if first.cell_methods is not None:
            attributes["cell_methods"] = first.cell_methods
        times, at_time = _times_of(messages)
        levels, at_level = np.unique([_level(message) for message in messages], return_inverse=True)
        table = np.full((len(times), len(levels)), -1)
        table[at_time, at_level] = np.arange(len(messages))
        dims = [self._time(times, messages, table)]
        kind = _level_kind(first)
        if kind in _LEVEL_ATTRIBUTES:
            dims.append(self._coordinate(kind, levels, _LEVEL_ATTRIBUTES[kind]))
        else:
            table = table[:, 0]
        dims.append(self._coordinate("latitude", first.grid.lat, {"units": "degrees_north"}))
        dims.append(self._coordinate("longitude", first.grid.lon, {"units": "degrees_east"}))
        fields = _Fields(self._path, name, messages, table)
        step = max(message.packing_step for message in messages)
        encoding: dict[str, object] = {"dtype": np.dtype(np.int32), "scale_factor": step} if step else {}
        if (table < 0).any():
            encoding[ABSENT] = table < 0
        self.variables[name] = xr.Variable(dims, indexing.LazilyIndexedArray(fields), attributes, encoding)

    def add_coefficients(self, message: Message) -> None:
        """Add what the model's half levels are made of, under the names that ECMWF's netCDF files give it."""
        coefficients = read_coefficients(self._path, message)
        if coefficients is not None:
            for name, values, units in zip(("hyai", "hybi"), coefficients, ("Pa", "1"), strict=True):
                self.variables[name] = xr.Variable(("half_level",), values, {"units": units})

    def _time(self, times: np.ndarray, messages: Sequence[Message], table: np.ndarray) -> str:
        attributes = {"units": EPOCH, "calendar": "standard", "standard_name": "time"}
        windows = [messages[row.max()].window for row in table]
        bounds = None if None in windows else np.stack([times - np.array(windows), times], axis=1)
        return self._coordinate("time", times, attributes, bounds)

    def _coordinate(
        self, name: str, values: np.ndarray, attributes: Mapping[str, str], bounds: np.ndarray | None = None
    ) -> str:
        """Return the name of the coordinate with these values, made where there is none yet."""
        key = (name, values.tobytes(), b"" if bounds is None else bounds.tobytes())
        if key not in self._names:
            number = sum(other == name for other, *_ in self._names)
            made = self._names[key] = f"{name}_{number}" if number else name
            self.variables[made] = xr.Variable((made,), values, dict(attributes))
            if bounds is not None:
                self.variables[made].attrs["bounds"] = f"{made}_bounds"
                self.variables[f"{made}_bounds"] = xr.Variable((made, "two"), bounds)
        return self._names[key]


class _Fields(BackendArray):
    """The values of one variable, read message by message.

    Args:
        path: the file.
        name: the variable, for messages.
        messages: its messages, all on one grid.
        table: (times,) or (times, levels), the message of each; -1 where there is none.
    """

    def __init__(self, path: Path, name: str, messages: Sequence[Message], table: np.ndarray) -> None:
        self._path, self._name, self._table = path, name, table
        self._offsets = np.array([(message.offset, message.place) for message in messages])
        self._grid: GribGrid = messages[0].grid
        self.shape = (*table.shape, len(self._grid.lat), len(self._grid.lon))
        self.dtype = np.dtype(np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[int | slice | np.ndarray, ...]) -> np.ndarray:
        """Return what the indices of times, levels, rows and columns choose, each by itself."""
        chosen = _take(self._table, key[:-2])
        if (chosen < 0).any():
            raise DataError(
                f"{self._path}: {self._name} does not have all its levels at all times; leave out the levels or the "
                "times that are not complete"
            )
        points = read_values(self._path, [tuple(self._offsets[number]) for number in chosen.ravel()])
        if self._grid.order is not None:
            points = points[:, self._grid.order]
        fields = points.reshape(*chosen.shape, *self.shape[-2:])
        return _take(fields, (*[slice(None)] * chosen.ndim, *key[-2:]))


def _take(array: np.ndarray, key: Sequence[int | slice | np.ndarray]) -> np.ndarray:
    """Return `array` indexed along each axis by itself; integers drop their axis."""
    for axis, index in reversed(list(enumerate(key))):
        array = array[(*[slice(None)] * axis, index)]
    return array


def _level_kind(message: Message) -> str:
    """Return the type of level, hPa and Pa being one."""
    return str(_kind_of_type(message.choices["typeOfLevel"]))


def _kind_of_type(type_of_level: Value | None) -> Value | None:
    return "pressure" if type_of_level in _PRESSURE else type_of_level


def _level(message: Message) -> float:
    return message.level * _PRESSURE.get(str(message.choices["typeOfLevel"]), 1.0)


def _times_of(messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
    """Return the valid times and each message's place in them; a time comes twice where a message does."""
    seen: dict[tuple[int, float], int] = defaultdict(int)
    times = []
    for message in messages:
        place = (message.minutes, _level(message))
        times.append((message.minutes, seen[place]))
        seen[place] += 1
    unique, at_time = np.unique(np.array(times, dtype=np.int64), axis=0, return_inverse=True)
    return np.ascontiguousarray(unique[:, 0]), at_time


def _why_unreadable(messages: Sequence[Message]) -> tuple[str | None, Sequence[str]]:
    """Return why a variable cannot be read as one, None where it can, and the keys of a selection that would help."""
    choices = [message.choices | {"typeOfLevel": _level_kind(message)} for message in messages]
    open_keys = [key for key in _ALWAYS_APART if len({choice.get(key) for choice in choices}) > 1]
    if not open_keys:
        open_keys = _keys_that_tell_apart(messages)
    if open_keys:
        lists = "; ".join(f"{key} {listing(_values_of(key, messages))}" for key in open_keys)
        return f"is there several times, with {lists}", open_keys
    kind, levels = _level_kind(messages[0]), sorted({message.level for message in messages})
    if kind not in _LEVEL_ATTRIBUTES and len(levels) > 1:
        problem = (
            f"is there on several levels of the type {kind} ({listing(levels)}), neither pressure nor model levels"
        )
        return problem, [kind]
    return messages[0].grid.problem, []


def _unreadable(
    problem: str, keys: Sequence[str], name: str, of_variable: Mapping[str, Sequence[Message]]
) -> Unreadable:
    choices = {key: _values_of(key, of_variable[name]) for key in keys}
    others = {
        other: frozenset(tuple(message.choices.get(key) for key in keys) for message in messages)
        for other, messages in of_variable.items()
        if other != name
    }
    return Unreadable(problem, choices, others)


def _values_of(key: str, messages: Sequence[Message]) -> list[Value]:
    return sorted({message.choices[key] for message in messages if key in message.choices})


def _keys_that_tell_apart(messages: Sequence[Message]) -> list[str]:
    """Return in which choices messages of one time and level differ."""
    groups: dict[tuple[int, float], list[Message]] = defaultdict(list)
    for message in messages:
        groups[message.minutes, _level(message)].append(message)
    return [
        key
        for key in CHOICES
        if any(len({message.choices.get(key) for message in group}) > 1 for group in groups.values())
    ]
