"""GRIB files, editions 1 and 2, as datasets with CF coordinates, like any other file.

Each variable of the dataset is (time, [level,] latitude, longitude), time being the valid time. A GRIB file may hold a
variable several times over (on surfaces of several kinds, as mean and as instantaneous value, for several members).
Such a variable stands in the dataset with the reason why it cannot be read, which is an error only for who wants it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from credit.data.grib_grid import GribGrid
from credit.data.grib_messages import CHOICES, Message, read_coefficients, read_messages, read_values
from credit.data.select import Value, listing, same_value
from credit.errors import ConfigError, DataError, did_you_mean
from credit.times import EPOCH

UNREADABLE = "unreadable"
# (times, levels) bool in the encoding of a variable on levels: where there is no message
ABSENT = "absent"
_PA_PER_HPA = 100.0
_PRESSURE = {"isobaricInhPa": 1.0, "isobaricInPa": 1.0 / _PA_PER_HPA}
_LEVEL_ATTRIBUTES = {
    "pressure": {"units": "hPa", "standard_name": "air_pressure"},
    "hybrid": {"units": "1", "standard_name": "atmosphere_hybrid_sigma_pressure_coordinate"},
}
# messages that differ in these are different fields, whatever their times; in the others, only where times coincide
_ALWAYS_APART = ("typeOfLevel", "stepType", "number", "grid")


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
    messages = _select(read_messages(path), select, str(path))
    of_variable: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        of_variable[message.parameter.name].append(message)
    builder = _Builder(path)
    for name, its_messages in of_variable.items():
        builder.add(name, its_messages)
    for name, its_messages in of_variable.items():
        for alias in its_messages[0].parameter.aliases:
            builder.variables.setdefault(alias, builder.variables[name])
    on_model_levels = next((message for message in messages if _level_kind(message) == "hybrid"), None)
    if on_model_levels is not None:
        builder.add_coefficients(on_model_levels)
    return xr.Dataset(builder.variables)


def _select(messages: list[Message], select: Mapping[str, Value], where: str) -> list[Message]:
    for key, wanted in select.items():
        have = dict.fromkeys(message.choices[key] for message in messages if key in message.choices)
        if not have:
            keys = {*CHOICES, *(str(message.choices["typeOfLevel"]) for message in messages)}
            if key in CHOICES:
                raise DataError(f"{where}: data.sources.N.select names {key}, but no message has it")
            raise ConfigError(f"{where}: data.sources.N.select names {key}{did_you_mean(key, keys)}")
        if not any(same_value(value, wanted) for value in have):
            raise DataError(
                f"{where}: data.sources.N.select: {key} {wanted} is not there; the file has {listing(sorted(have))}"
            )
        messages = [
            message for message in messages if key not in message.choices or same_value(message.choices[key], wanted)
        ]
    return messages


class _Builder:
    """Puts messages together to variables; equal coordinates are shared."""

    def __init__(self, path: Path) -> None:
        self.variables: dict[str, xr.Variable] = {}
        self._path = path
        self._names: dict[tuple[str, bytes, bytes], str] = {}

    def add(self, name: str, messages: list[Message]) -> None:
        """Add the variable that these messages are."""
        first = messages[0]
        attributes = dict(first.parameter.attributes)
        problem = _why_unreadable(messages)
        if problem is not None:
            nothing = np.empty((0, 0), np.float32)
            encoding = {UNREADABLE: problem}
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
    kind = str(message.choices["typeOfLevel"])
    return "pressure" if kind in _PRESSURE else kind


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


def _why_unreadable(messages: Sequence[Message]) -> str | None:
    """Return why a variable cannot be read as one, in words that follow its name; None where it can."""
    choices = [message.choices | {"typeOfLevel": _level_kind(message)} for message in messages]
    open_keys = [key for key in _ALWAYS_APART if len({choice.get(key) for choice in choices}) > 1]
    if not open_keys:
        open_keys = _keys_that_tell_apart(messages)
    if open_keys:
        lists = []
        for key in open_keys:
            have = sorted({message.choices[key] for message in messages if key in message.choices})
            lists.append((f"{key}: {listing(have[:1])}", f"{key} {listing(have)}"))
        return (
            f"is there several times, with {'; '.join(text for _, text in lists)}; choose with data.sources.N.select: "
            f"{{{', '.join(example for example, _ in lists)}}} (a source of its own where other variables need others)"
        )
    kind, levels = _level_kind(messages[0]), sorted({message.level for message in messages})
    if kind not in _LEVEL_ATTRIBUTES and len(levels) > 1:
        return (
            f"is there on several levels of the type {kind} ({listing(levels)}), which are neither pressure nor model "
            f"levels; choose one with data.sources.N.select: {{{kind}: {levels[0]:g}}}"
        )
    return messages[0].grid.problem


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
