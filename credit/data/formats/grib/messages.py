"""Messages of a GRIB file: parameter, level, time, grid and offset of each, and their values.

A GRIB file is a sequence of messages without a table of contents; each is one horizontal field with its description. So
a file is read once from end to end to list its contents. No index file is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import numpy as np

from credit.errors import DataError
from credit.utils.installation import install_command

# Keys that distinguish messages of one variable besides time and level, and that ``data.sources.N.select`` may name.
SELECTION_KEYS = ("typeOfLevel", "stepType", "number", "grid", "step", "expver", "dataType", "stream")
# Code of a unit of steps (GRIB code table 4.4) -> its length; months and longer units have no fixed one.
_MINUTES_PER_UNIT = {0: 1, 1: 60, 2: 1440, 10: 180, 11: 360, 12: 720}
# stepType -> CF's cell_methods.
_CELL_METHODS = {"avg": "time: mean", "accum": "time: sum", "max": "time: maximum", "min": "time: minimum"}
# Origin of minutes, the same as `credit.calendar.TIME_UNITS`.
_EPOCH = datetime(1900, 1, 1)
_MINUTE = timedelta(minutes=1)
# Stands for missing values while they are read. Fields can contain the default of ecCodes, 9999, but not this.
_MISSING = -1e100

# Types of grids (gridType of ecCodes): those whose rows all have the same longitudes, and those whose rows differ.
_REGULAR = ("regular_ll", "regular_gg")
_REDUCED = ("reduced_gg", "reduced_ll")


@dataclass(frozen=True)
class GribGrid:
    """Latitudes and longitudes of the values of a message.

    Attributes:
        name: type and size, such as ``regular_ll 181x360``.
        lat: (H,) degrees north, from north to south.
        lon: (W,) degrees east, ascending.
        order: (H * W,) index in the message of each point of (lat, lon); None if the message has them in this order.
        problem: reason why the grid cannot be used, and what to do, as a text that follows the name of a variable;
            None if it can be used.
    """

    name: str
    lat: np.ndarray = field(default_factory=lambda: np.empty(0))
    lon: np.ndarray = field(default_factory=lambda: np.empty(0))
    order: np.ndarray | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Parameter:
    """Parameter (variable) of a message.

    Attributes:
        name: shortName of ecCodes (``2t``), or the numbers of a parameter that ecCodes does not know.
        aliases: the CF name (``t2m``) and the paramId (``167``).
        attributes: units, standard_name, long_name.
    """

    name: str
    aliases: tuple[str, ...]
    attributes: dict[str, str]


@dataclass(frozen=True)
class Message:
    """Description of one field.

    Attributes:
        offset: first byte of the message in the file.
        field_number: index among the fields of the message (GRIB 2 allows several).
        parameter: its parameter.
        grid: its grid.
        minutes: valid time in minutes since 1900; the end of the window of a mean or an accumulation.
        window: length of that window in minutes; None for an instantaneous field, or if the length is not fixed.
        level: the level in units of its type.
        key_values: GRIB key -> its value, for the `SELECTION_KEYS` that the message has; also its type of level -> its
            level.
        packing_step: step of the packed integers in units of the field; 0 if they are not packed linearly.
    """

    offset: int
    field_number: int
    parameter: Parameter
    grid: GribGrid
    minutes: int
    window: int | None
    level: float
    key_values: dict[str, float | int | str]
    packing_step: float

    @property
    def cell_methods(self) -> str | None:
        """CF's ``cell_methods`` of a mean, sum or extreme over the window; None for other fields."""
        return _CELL_METHODS.get(str(self.key_values.get("stepType")))


def import_eccodes() -> object:
    """Return the module eccodes.

    Raises:
        DataError: if it is not installed; the message says how to install it.
    """
    try:
        import eccodes
    except (ImportError, RuntimeError) as error:  # A RuntimeError means that the C library is missing.
        raise DataError(f"GRIB files need ecCodes ({error}); install it with: {install_command('grib')}") from error
    return eccodes


def read_messages(path: Path) -> list[Message]:
    """Return the descriptions of all messages of a file, in its order; reads the whole file.

    Raises:
        DataError: if ecCodes is not installed, or the file is truncated or has no message.
    """
    eccodes = import_eccodes()
    # Parameters and grids that messages share are built once.
    parameters: dict[object, Parameter] = {}
    grids: dict[str, GribGrid] = {}
    messages: list[Message] = []
    previous_offset = -1
    field_number = 0
    try:
        with open(path, "rb") as file, _split_multi_field_messages(file):
            while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
                try:
                    offset = int(eccodes.codes_get(handle, "offset", int))
                    # The fields of one message come one after the other, with the same offset.
                    field_number = field_number + 1 if offset == previous_offset else 0
                    previous_offset = offset
                    messages.append(_build_message(handle, offset, field_number, parameters, grids))
                finally:
                    eccodes.codes_release(handle)
    except (OSError, ValueError, eccodes.CodesInternalError) as error:
        raise DataError(
            f"{path}: message {len(messages) + 1} cannot be read as GRIB ({error}); the file may be truncated, still "
            "being written, or of another format: copy it again, or set data.sources.N.format"
        ) from error
    if not messages:
        raise DataError(f"{path}: contains no GRIB message; if it is of another format, set data.sources.N.format")
    return messages


def read_values(path: Path, messages: list[tuple[int, int]]) -> np.ndarray:
    """Return fields (N, points) float32 in the order of points of the file; missing values are NaN.

    Args:
        path: the file.
        messages: (offset, field number) of each of the N fields, see `Message`.

    Raises:
        DataError: if ecCodes is not installed.
        OSError: if the file cannot be read; ecCodes raises errors of its own for damaged messages.
    """
    eccodes = import_eccodes()
    fields = []
    with open(path, "rb") as file, _split_multi_field_messages(file):
        for offset, field_number in messages:
            file.seek(offset)
            # Without this, ecCodes would continue with the fields of the message that it read before.
            eccodes.codes_grib_multi_support_reset_file(file)
            # ecCodes cannot seek to a later field of a message, so those before it are skipped.
            for _ in range(field_number):
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
    """Return the coefficients of the half levels of the model, from the top down: pressure is a + b * surface pressure.

    Args:
        path: the file.
        message: a message on model levels.

    Returns:
        (2, levels + 1) float64: a in Pa, then b; None if the message does not list them.

    Raises:
        DataError: if ecCodes is not installed.
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
def _split_multi_field_messages(file: BinaryIO) -> Iterator[None]:
    """Context in which ecCodes returns each field of a message of a file as if it were a message of its own."""
    eccodes = import_eccodes()
    eccodes.codes_grib_multi_support_on()
    try:
        yield
    finally:
        eccodes.codes_grib_multi_support_off()
        eccodes.codes_grib_multi_support_reset_file(file)


def _get(handle: int, key: str, kind: type | None = None) -> object:
    """Return the value of a key, None if the message does not have it or it is not known.

    Args:
        handle: handle of a message in ecCodes.
        key: GRIB key.
        kind: type of the value; None for the type that the key has.
    """
    eccodes = import_eccodes()
    try:
        value = eccodes.codes_get(handle, key, kind)
    except eccodes.KeyValueNotFoundError:
        return None
    # These texts of ecCodes mean that a value is not known.
    return None if value in ("unknown", "~", "off") else value


def _build_message(
    handle: int, offset: int, field_number: int, parameters: dict[object, Parameter], grids: dict[str, GribGrid]
) -> Message:
    """Return the description of a field, see `Message`.

    Parameters and grids of earlier messages are reused, and new ones are added to the dictionaries. A message without a
    date raises ValueError.
    """
    grid_key = f"{_get(handle, 'gridType')} {_get(handle, 'md5GridSection')}"
    if grid_key not in grids:
        grids[grid_key] = _read_grid(handle)
    # Looking up names takes most of the time, so those of each parameter are looked up once.
    param_id = _get(handle, "paramId", int)
    parameter_key = param_id or _build_unknown_name(handle)
    if parameter_key not in parameters:
        parameters[parameter_key] = _read_parameter(handle, param_id)
    minutes = _to_minutes(_get(handle, "validityDate", int), _get(handle, "validityTime", int))
    initial_minutes = _to_minutes(_get(handle, "dataDate", int), _get(handle, "dataTime", int))
    level_type = _get(handle, "typeOfLevel", str) or "unknown"
    level = float(_get(handle, "level", float) or 0.0)
    # Values that a selection may name: those of the message, and those that are computed from several keys.
    key_values = {name: _get(handle, name) for name in ("stepType", "number", "expver", "dataType", "stream")}
    key_values["grid"] = grids[grid_key].name
    key_values["step"] = (minutes - initial_minutes) / 60
    key_values["typeOfLevel"] = level_type
    key_values[level_type] = level
    window = None
    if key_values["stepType"] != "instant":
        window = _read_window(handle)
    return Message(
        offset=offset,
        field_number=field_number,
        parameter=parameters[parameter_key],
        grid=grids[grid_key],
        minutes=minutes,
        window=window,
        level=level,
        key_values={key: value for key, value in key_values.items() if value is not None},
        packing_step=_read_packing_step(handle),
    )


def _read_packing_step(handle: int) -> float:
    """Return the step of packed integers in units of the field, 0 if they are not packed linearly.

    WMO, Manual on Codes (WMO-No. 306), volume I.2: a value is (R + X 2^E) 10^-D for the integer X.
    """
    if not str(_get(handle, "packingType")).startswith("grid_"):
        return 0.0
    binary_scale = _get(handle, "binaryScaleFactor", int)
    decimal_scale = _get(handle, "decimalScaleFactor", int)
    if binary_scale is None or decimal_scale is None:
        return 0.0
    return 2.0**binary_scale * 10.0**-decimal_scale


def _read_parameter(handle: int, param_id: int | None) -> Parameter:
    """Return the parameter of a message; `param_id` is its number in the tables of ECMWF, None or 0 if it has none."""
    name = _get(handle, "shortName", str) or _build_unknown_name(handle)
    aliases = []
    cf_name = _get(handle, "cfVarName", str)
    if cf_name:
        aliases.append(cf_name)
    if param_id:
        aliases.append(str(param_id))
    attributes = {}
    for grib_key, cf_attribute in {"units": "units", "cfName": "standard_name", "name": "long_name"}.items():
        value = _get(handle, grib_key, str)
        if value:
            attributes[cf_attribute] = str(value)
    return Parameter(str(name), tuple(aliases), attributes)


def _build_unknown_name(handle: int) -> str:
    """Return a name made of the numbers of a parameter that ecCodes does not know, so that no two share a name."""
    keys: tuple[str, ...] = ("discipline", "parameterCategory", "parameterNumber")
    if _get(handle, "edition", int) == 1:
        keys = ("indicatorOfParameter", "table2Version")
    return ".".join(str(_get(handle, key, int)) for key in keys)


def _to_minutes(date: int | None, time: int | None) -> int:
    """Return minutes since 1900 of a date and a time, the decimal numbers YYYYMMDD and HHMM.

    Raises:
        ValueError: if the message has no date.
    """
    if date is None or time is None:
        raise ValueError("it has no date")
    day = datetime(date // 10000, date // 100 % 100, date % 100, time // 100, time % 100)
    return (day - _EPOCH) // _MINUTE


def _read_window(handle: int) -> int | None:
    """Return the minutes that a mean or an accumulation covers; None if its unit of time has no fixed length."""
    minutes_per_unit = _MINUTES_PER_UNIT.get(_get(handle, "stepUnits", int))
    if minutes_per_unit is None:
        return None
    return (_get(handle, "endStep", int) - _get(handle, "startStep", int)) * minutes_per_unit


def _read_grid(handle: int) -> GribGrid:
    """Return the grid of a message; `GribGrid.problem` says so if the grid cannot be used.

    Rows and columns are derived from the coordinates of all points, so that the scanning directions do not matter.
    """
    eccodes = import_eccodes()
    grid_type = eccodes.codes_get(handle, "gridType", str)
    if grid_type not in _REGULAR:
        return GribGrid(grid_type, problem=_describe_unsupported_grid(grid_type))
    try:
        lat_of_point = eccodes.codes_get_array(handle, "latitudes", float)
        lon_of_point = eccodes.codes_get_array(handle, "longitudes", float)
    except eccodes.CodesInternalError as error:
        return GribGrid(grid_type, problem=f"is on a grid whose coordinates ecCodes cannot compute ({error})")
    lat = np.unique(lat_of_point)[::-1]
    lon = np.unique(lon_of_point)
    name = f"{grid_type} {len(lat)}x{len(lon)}"
    if len(lat) * len(lon) != len(lat_of_point):
        return GribGrid(name, problem=f"has {len(lat_of_point)} points, which are not {len(lat)} rows of {len(lon)}")
    if _get_flag(handle, "alternativeRowScanning"):
        # Every second line runs backwards, but ecCodes computes coordinates as if it did not.
        line_length = len(lat) if _get_flag(handle, "jPointsAreConsecutive") else len(lon)
        scan_order = np.arange(len(lat_of_point)).reshape(-1, line_length)
        scan_order[1::2] = scan_order[1::2, ::-1]
        lat_of_point = lat_of_point[scan_order.ravel()]
        lon_of_point = lon_of_point[scan_order.ravel()]
    order = np.lexsort((lon_of_point, -lat_of_point))
    is_in_order = np.array_equal(order, np.arange(len(order)))
    return GribGrid(name, lat, lon, None if is_in_order else order)


def _get_flag(handle: int, key: str) -> bool:
    """Return the value of a key that is 0 or 1, False if the message does not have it."""
    eccodes = import_eccodes()
    return bool(eccodes.codes_is_defined(handle, key) and eccodes.codes_get(handle, key, int))


def _describe_unsupported_grid(grid_type: str) -> str:
    """Return why a grid of this type cannot be used, and what to do, as a text that follows the name of a variable."""
    if grid_type in _REDUCED:
        return (
            f"is on a reduced grid ({grid_type}), whose rows have fewer points towards the poles; make them equally "
            "long, for example with cdo setgridtype,regular IN OUT, or ask the archive for a regular grid (MARS, CDS: "
            "grid=1/1)"
        )
    if grid_type == "sh":
        return (
            "is given as spherical harmonics, not as values on a grid; transform it, for example with cdo sp2gpl IN "
            "OUT, or ask the archive for a regular grid (MARS, CDS: grid=1/1)"
        )
    return (
        f"is on a grid of the type {grid_type}; only global latitude-longitude and regular Gaussian grids can be used: "
        "interpolate it, for example with cdo remapbil,r360x181 IN OUT"
    )
