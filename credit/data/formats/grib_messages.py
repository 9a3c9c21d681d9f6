"""The messages of a GRIB file: what each is, where it begins, and its values.

A GRIB file is a row of messages without a table of contents; each is one horizontal field with its description. So a
file is read once from end to end to know what it holds. Nothing is written beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import numpy as np

from credit.data.formats.grib_grid import GribGrid, read_grid
from credit.errors import DataError
from credit.utils.installation import install_command

# what tells messages of one variable apart, besides time and level
CHOICES = ("typeOfLevel", "stepType", "number", "grid", "step", "expver", "dataType", "stream")
_UNIT_MINUTES = {0: 1, 1: 60, 2: 1440, 10: 180, 11: 360, 12: 720}
_CELL_METHODS = {"avg": "time: mean", "accum": "time: sum", "max": "time: maximum", "min": "time: minimum"}
_EPOCH = datetime(1900, 1, 1)
_MINUTE = timedelta(minutes=1)
# no field holds it, unlike ecCodes' default 9999
_MISSING = -1e100


@dataclass(frozen=True)
class Parameter:
    """What a field is.

    Attributes:
        name: ecCodes' shortName (``2t``), or the numbers of a parameter that it does not know.
        aliases: the CF name (``t2m``) and the paramId (``167``).
        attributes: units, standard_name, long_name.
    """

    name: str
    aliases: tuple[str, ...]
    attributes: dict[str, str]


@dataclass(frozen=True)
class Message:
    """One field.

    Attributes:
        offset: where its message begins in the file.
        place: its place among the fields of the message (GRIB 2 allows several).
        parameter: what it is.
        grid: where its values lie.
        minutes: valid time; the end of the window of a mean or an accumulation.
        window: minutes of that window, None for an instantaneous field.
        level: the level in units of its type.
        choices: the `CHOICES` that it has, and its type of level -> level.
        packing_step: distance of two neighbouring values that it can hold; 0 where it is not packed simply.
    """

    offset: int
    place: int
    parameter: Parameter
    grid: GribGrid
    minutes: int
    window: int | None
    level: float
    choices: dict[str, float | int | str]
    packing_step: float

    @property
    def cell_methods(self) -> str | None:
        """CF's name for what is done over the window."""
        return _CELL_METHODS.get(str(self.choices.get("stepType")))


def import_eccodes() -> object:
    """Return the module eccodes.

    Raises:
        DataError: saying how to install it.
    """
    try:
        import eccodes
    except (ImportError, RuntimeError) as error:  # RuntimeError: the package without its C library
        raise DataError(f"GRIB files need ecCodes ({error}); install it with: {install_command('grib')}") from error
    return eccodes


def read_messages(path: Path) -> list[Message]:
    """Return what every message of a file is; reads the whole file.

    Raises:
        DataError: if the file is truncated, or holds no message.
    """
    eccodes = import_eccodes()
    parameters: dict[object, Parameter] = {}
    grids: dict[str, GribGrid] = {}
    messages: list[Message] = []
    last, place = -1, 0
    try:
        with open(path, "rb") as file, _several_fields(file):
            while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
                try:
                    offset = int(eccodes.codes_get(handle, "offset", int))
                    place = place + 1 if offset == last else 0
                    last = offset
                    messages.append(_describe(handle, offset, place, parameters, grids))
                finally:
                    eccodes.codes_release(handle)
    except (OSError, ValueError, eccodes.CodesInternalError) as error:
        raise DataError(
            f"{path}: message {len(messages) + 1} cannot be read as GRIB ({error}); the file may be truncated, still "
            "being written, or of another format: copy it again, or set data.sources.N.format"
        ) from error
    if not messages:
        raise DataError(f"{path}: holds no GRIB message; if it is of another format, set data.sources.N.format")
    return messages


def read_values(path: Path, messages: list[tuple[int, int]]) -> np.ndarray:
    """Return the fields (N, points) float32 of messages, given by offset and place, in the file's order of points.

    Missing values are NaN.
    """
    eccodes = import_eccodes()
    fields = []
    with open(path, "rb") as file, _several_fields(file):
        for offset, place in messages:
            file.seek(offset)
            eccodes.codes_grib_multi_support_reset_file(file)
            for _ in range(place):
                eccodes.codes_release(eccodes.codes_grib_new_from_file(file))
            handle = eccodes.codes_grib_new_from_file(file)
            try:
                eccodes.codes_set(handle, "missingValue", _MISSING)
                values = eccodes.codes_get_array(handle, "values", float)
                fields.append(np.where(values == _MISSING, np.nan, values).astype(np.float32))
            finally:
                eccodes.codes_release(handle)
    return np.stack(fields)


def read_coefficients(path: Path, message: Message) -> np.ndarray | None:
    """Return the coefficients of the model's half levels (2, levels + 1), a in Pa and b, from the top down.

    None where the message does not list them.
    """
    eccodes = import_eccodes()
    with open(path, "rb") as file:
        file.seek(message.offset)
        handle = eccodes.codes_grib_new_from_file(file)
        try:
            if not _get(handle, "PVPresent", int):
                return None
            return eccodes.codes_get_array(handle, "pv", float).reshape(2, -1)
        finally:
            eccodes.codes_release(handle)


@contextmanager
def _several_fields(file: BinaryIO) -> Iterator[None]:
    """Let the fields of one message follow each other as if each had its own."""
    eccodes = import_eccodes()
    eccodes.codes_grib_multi_support_on()
    try:
        yield
    finally:
        eccodes.codes_grib_multi_support_off()
        eccodes.codes_grib_multi_support_reset_file(file)


def _get(handle: int, key: str, kind: type | None = None) -> object:
    """Return a key's value, None where the message does not have it."""
    eccodes = import_eccodes()
    try:
        value = eccodes.codes_get(handle, key, kind)
    except eccodes.KeyValueNotFoundError:
        return None
    return None if value in ("unknown", "~", "off") else value


def _describe(
    handle: int, offset: int, place: int, parameters: dict[object, Parameter], grids: dict[str, GribGrid]
) -> Message:
    grid_key = f"{_get(handle, 'gridType')} {_get(handle, 'md5GridSection')}"
    if grid_key not in grids:
        grids[grid_key] = read_grid(handle)
    # looking up names takes most of the time, so each parameter's are looked up once
    number = _get(handle, "paramId", int)
    parameter_key = number or _unknown_name(handle)
    if parameter_key not in parameters:
        parameters[parameter_key] = _parameter(handle, number)
    minutes = _minutes(_get(handle, "validityDate", int), _get(handle, "validityTime", int))
    initial = _minutes(_get(handle, "dataDate", int), _get(handle, "dataTime", int))
    level_type, level = _get(handle, "typeOfLevel", str) or "unknown", float(_get(handle, "level", float) or 0.0)
    known = {name: _get(handle, name) for name in ("stepType", "number", "expver", "dataType", "stream")}
    known |= {"grid": grids[grid_key].name, "step": (minutes - initial) / 60, "typeOfLevel": level_type}
    known[level_type] = level
    packed = str(_get(handle, "packingType")).startswith("grid_")
    scale = (_get(handle, "binaryScaleFactor", int), _get(handle, "decimalScaleFactor", int)) if packed else (None, 0)
    return Message(
        offset,
        place,
        parameters[parameter_key],
        grids[grid_key],
        minutes,
        None if known["stepType"] == "instant" else _window(handle),
        level,
        {key: value for key, value in known.items() if value is not None},
        0.0 if None in scale else 2.0 ** scale[0] * 10.0 ** -scale[1],
    )


def _parameter(handle: int, number: int | None) -> Parameter:
    name = _get(handle, "shortName", str) or _unknown_name(handle)
    aliases = [_get(handle, "cfVarName", str), str(number) if number else None]
    attributes = {"units": "units", "cfName": "standard_name", "name": "long_name"}
    found = {ours: _get(handle, theirs, str) for theirs, ours in attributes.items()}
    return Parameter(str(name), tuple(alias for alias in aliases if alias), {k: str(v) for k, v in found.items() if v})


def _unknown_name(handle: int) -> str:
    """Return the numbers of a parameter that ecCodes has no name for: two of them must not be taken for one."""
    if _get(handle, "edition", int) == 1:
        keys = ("indicatorOfParameter", "table2Version")
    else:
        keys = ("discipline", "parameterCategory", "parameterNumber")
    return ".".join(str(_get(handle, key, int)) for key in keys)


def _minutes(date: int | None, time: int | None) -> int:
    """Return minutes since 1900 of a date YYYYMMDD and a time HHMM."""
    if date is None or time is None:
        raise ValueError("it has no date")
    day = datetime(date // 10000, date // 100 % 100, date % 100, time // 100, time % 100)
    return (day - _EPOCH) // _MINUTE


def _window(handle: int) -> int | None:
    unit = _UNIT_MINUTES.get(_get(handle, "stepUnits", int))
    return None if unit is None else (_get(handle, "endStep", int) - _get(handle, "startStep", int)) * unit
