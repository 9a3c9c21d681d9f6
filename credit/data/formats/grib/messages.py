"""Reading of GRIB messages: the description of each message (parameter, level, time, grid, offset) and its values.

A GRIB file is a sequence of messages without a table of contents. Each message contains a horizontal field and its
description. To list the contents, the file is read once from beginning to end. No index file is written.
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

# Keys that, in addition to time and level, distinguish messages of a variable; allowed in ``data.sources.N.select``.
SELECTION_KEYS = ("typeOfLevel", "stepType", "number", "grid", "step", "expver", "dataType", "stream")
# Code of a unit of steps (GRIB code table 4.4) -> length in minutes. Months and longer units have no fixed length.
_MINUTES_PER_UNIT = {0: 1, 1: 60, 2: 1440, 10: 180, 11: 360, 12: 720}
# Value of the GRIB key stepType -> CF attribute cell_methods.
_CELL_METHODS = {"avg": "time: mean", "accum": "time: sum", "max": "time: maximum", "min": "time: minimum"}
# Epoch of times in minutes, the same as in `credit.calendar.TIME_UNITS`.
_EPOCH = datetime(1900, 1, 1)
_MINUTE = timedelta(minutes=1)
# Value that ecCodes must return for missing values. Its default, 9999, may also be a valid value of a field.
_MISSING = -1e100

# Types of grids (gridType of ecCodes). All rows of a regular grid have the same longitudes; rows of a reduced grid not.
_REGULAR = ("regular_ll", "regular_gg")
_REDUCED = ("reduced_gg", "reduced_ll")


@dataclass(frozen=True)
class GribGrid:
    """Grid of the values of a message.

    Attributes:
        name: type of grid, and numbers of rows and columns, such as ``regular_ll 181x360``.
        lat: (H,) latitudes of the rows in degrees north, from north to south.
        lon: (W,) longitudes of the columns in degrees east, ascending.
        order: (H * W,) indices in the message of the grid points in row-by-row order; None if the message already has
            this order.
        problem: reason why the grid cannot be used, and advice; None if the grid can be used. The text follows the
            name of a variable in an error message.
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
        name: shortName of ecCodes, such as ``2t``; for a parameter that is unknown to ecCodes, its code numbers.
        aliases: other names: the CF name, such as ``t2m``, and the paramId, such as ``167``.
        attributes: CF attributes ``units``, ``standard_name`` and ``long_name``, as far as ecCodes defines them.
    """

    name: str
    aliases: tuple[str, ...]
    attributes: dict[str, str]


@dataclass(frozen=True)
class Message:
    """Description of one field of a GRIB file.

    Attributes:
        offset: position of the first byte of the message in the file.
        field_number: index of the field within the message (GRIB 2 allows several fields in a message).
        parameter: parameter (variable) of the field.
        grid: grid of the field.
        minutes: valid time in minutes since 1900; for a mean or an accumulation, the end of the time window.
        window: length of the time window in minutes; None for an instantaneous field, or if the length is not fixed.
        level: value of the level, in the units of its type of level.
        key_values: key -> value, for all `SELECTION_KEYS` of the message. In addition, the type of level is a key with
            the value `level`, such as ``heightAboveGround: 2``.
        packing_step: difference of adjacent packed values in units of the field; 0 without linear packing.
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
        """CF attribute ``cell_methods`` of a mean, sum or extreme over the time window; None for other fields."""
        return _CELL_METHODS.get(str(self.key_values.get("stepType")))


def import_eccodes() -> object:
    """Import and return the Python module eccodes.

    Raises:
        DataError: if ecCodes is not installed; the message contains the install command.
    """
    try:
        import eccodes
    except (ImportError, RuntimeError) as error:  # A RuntimeError means that the C library is missing.
        raise DataError(f"GRIB files need ecCodes ({error}); install it with: {install_command('grib')}") from error
    return eccodes


def read_messages(path: Path) -> list[Message]:
    """Read a GRIB file from beginning to end, and return the descriptions of all its fields in the order of the file.

    Raises:
        DataError: if ecCodes is not installed, or the file is truncated or contains no message.
    """
    eccodes = import_eccodes()
    # Build parameters and grids that several messages share once.
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
                    # The fields of a multi-field message follow each other, with the same offset.
                    if offset == previous_offset:
                        field_number += 1
                    else:
                        field_number = 0
                    previous_offset = offset
                    messages.append(_build_message(handle, offset, field_number, parameters, grids))
                finally:
                    eccodes.codes_release(handle)
    except (OSError, ValueError, eccodes.CodesInternalError) as error:
        raise DataError(
            f"{path}: message {len(messages) + 1} cannot be read as GRIB ({error}); the file may be truncated, still "
            "being written, or of a different format: copy it again, or set data.sources.N.format"
        ) from error
    if not messages:
        raise DataError(f"{path}: contains no GRIB message; if it has a different format, set data.sources.N.format")
    return messages


def read_values(path: Path, messages: list[tuple[int, int]]) -> np.ndarray:
    """Return the values of N fields, (N, points) float32 in the order of the file, with missing values as NaN.

    Args:
        path: path of the file.
        messages: (`Message.offset`, `Message.field_number`) of each of the N fields.

    Raises:
        DataError: if ecCodes is not installed.
        OSError: if the file cannot be read. A damaged message raises an error of ecCodes.
    """
    eccodes = import_eccodes()
    fields = []
    with open(path, "rb") as file, _split_multi_field_messages(file):
        for offset, field_number in messages:
            file.seek(offset)
            # Without this call, ecCodes would continue with the fields of the previous message.
            eccodes.codes_grib_multi_support_reset_file(file)
            # ecCodes cannot seek to a later field of a message, so skip the fields before it.
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
    """Return the hybrid coefficients a and b of the half levels; pressure is a + b * surface pressure.

    Args:
        path: path of the file.
        message: a message on model levels.

    Returns:
        (2, levels + 1) float64: a in Pa, then b, from the top level down; None if the message does not contain them.

    Raises:
        DataError: if ecCodes is not installed.
    """
    eccodes = import_eccodes()
    with open(path, "rb") as file:
        file.seek(message.offset)
        handle = eccodes.codes_grib_new_from_file(file)
        try:
            if not _read_key(handle, "PVPresent", int):
                return None
            return eccodes.codes_get_array(handle, "pv", float).reshape(2, -1)
        finally:
            eccodes.codes_release(handle)


@contextmanager
def _split_multi_field_messages(file: BinaryIO) -> Iterator[None]:
    """Return a context manager in which ecCodes returns each field of a multi-field message as a separate message."""
    eccodes = import_eccodes()
    eccodes.codes_grib_multi_support_on()
    try:
        yield
    finally:
        eccodes.codes_grib_multi_support_off()
        eccodes.codes_grib_multi_support_reset_file(file)


def _read_key(handle: int, key: str, kind: type | None = None) -> object:
    """Return the value of a GRIB key; None if the message does not contain the key, or its value is unknown.

    Args:
        handle: handle of a message in ecCodes.
        key: GRIB key.
        kind: type of the value to return; None for the type of the key.
    """
    eccodes = import_eccodes()
    try:
        value = eccodes.codes_get(handle, key, kind)
    except eccodes.KeyValueNotFoundError:
        return None
    # ecCodes returns these strings for unknown values.
    if value in ("unknown", "~", "off"):
        return None
    return value


def _build_message(
    handle: int, offset: int, field_number: int, parameters: dict[object, Parameter], grids: dict[str, GribGrid]
) -> Message:
    """Build the `Message` that describes the field of an open ecCodes handle.

    Parameters and grids of earlier messages are reused; new parameters and grids are added to `parameters` and `grids`.
    A message without a date raises ValueError.
    """
    grid_key = f"{_read_key(handle, 'gridType')} {_read_key(handle, 'md5GridSection')}"
    if grid_key not in grids:
        grids[grid_key] = _read_grid(handle)
    # Looking up names is slow, so the names of each parameter are looked up once.
    param_id = _read_key(handle, "paramId", int)
    parameter_key = param_id or _build_unknown_name(handle)
    if parameter_key not in parameters:
        parameters[parameter_key] = _read_parameter(handle, param_id)
    minutes = _convert_to_minutes(_read_key(handle, "validityDate", int), _read_key(handle, "validityTime", int))
    initial_minutes = _convert_to_minutes(_read_key(handle, "dataDate", int), _read_key(handle, "dataTime", int))
    level_type = _read_key(handle, "typeOfLevel", str) or "unknown"
    level = float(_read_key(handle, "level", float) or 0.0)
    # Values by which messages can be selected: values of GRIB keys, and values computed from several keys.
    key_values = {name: _read_key(handle, name) for name in ("stepType", "number", "expver", "dataType", "stream")}
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
    """Return the difference of adjacent packed values in units of the field; 0 if the field is not packed linearly.

    A packed integer X represents the value (R + X 2^E) 10^-D; see WMO, Manual on Codes (WMO-No. 306), volume I.2.
    """
    if not str(_read_key(handle, "packingType")).startswith("grid_"):
        return 0.0
    binary_scale = _read_key(handle, "binaryScaleFactor", int)
    decimal_scale = _read_key(handle, "decimalScaleFactor", int)
    if binary_scale is None or decimal_scale is None:
        return 0.0
    return 2.0**binary_scale * 10.0**-decimal_scale


def _read_parameter(handle: int, param_id: int | None) -> Parameter:
    """Return the parameter of a message; `param_id` is the paramId in ecCodes, None or 0 if it is unknown."""
    name = _read_key(handle, "shortName", str) or _build_unknown_name(handle)
    aliases = []
    cf_name = _read_key(handle, "cfVarName", str)
    if cf_name:
        aliases.append(cf_name)
    if param_id:
        aliases.append(str(param_id))
    attributes = {}
    for grib_key, cf_attribute in {"units": "units", "cfName": "standard_name", "name": "long_name"}.items():
        value = _read_key(handle, grib_key, str)
        if value:
            attributes[cf_attribute] = str(value)
    return Parameter(str(name), tuple(aliases), attributes)


def _build_unknown_name(handle: int) -> str:
    """Return a unique name for a parameter that is unknown to ecCodes, built from its code numbers in GRIB."""
    keys: tuple[str, ...] = ("discipline", "parameterCategory", "parameterNumber")
    if _read_key(handle, "edition", int) == 1:
        keys = ("indicatorOfParameter", "table2Version")
    return ".".join(str(_read_key(handle, key, int)) for key in keys)


def _convert_to_minutes(date: int | None, time: int | None) -> int:
    """Convert a date (integer YYYYMMDD) and a time of the day (integer HHMM) to minutes since 1900.

    Raises:
        ValueError: if `date` or `time` is None.
    """
    if date is None or time is None:
        raise ValueError("the message has no date")
    day = datetime(date // 10000, date // 100 % 100, date % 100, time // 100, time % 100)
    return (day - _EPOCH) // _MINUTE


def _read_window(handle: int) -> int | None:
    """Return the length in minutes of the window of a mean or sum; None if its time unit has no fixed length."""
    minutes_per_unit = _MINUTES_PER_UNIT.get(_read_key(handle, "stepUnits", int))
    if minutes_per_unit is None:
        return None
    return (_read_key(handle, "endStep", int) - _read_key(handle, "startStep", int)) * minutes_per_unit


def _read_grid(handle: int) -> GribGrid:
    """Return the grid of a message. If the grid cannot be used, `GribGrid.problem` contains the reason.

    Rows and columns are derived from the coordinates of all points, so the scanning directions do not matter.
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
        # Every second line is scanned backwards, but ecCodes ignores this when it computes coordinates.
        line_length = len(lat) if _get_flag(handle, "jPointsAreConsecutive") else len(lon)
        scan_order = np.arange(len(lat_of_point)).reshape(-1, line_length)
        scan_order[1::2] = scan_order[1::2, ::-1]
        lat_of_point = lat_of_point[scan_order.ravel()]
        lon_of_point = lon_of_point[scan_order.ravel()]
    # Rows from north to south, and in each row longitudes from west to east (`lexsort` sorts by its last key first).
    order: np.ndarray | None = np.lexsort((lon_of_point, -lat_of_point))
    if np.array_equal(order, np.arange(len(order))):
        order = None
    return GribGrid(name, lat, lon, order)


def _get_flag(handle: int, key: str) -> bool:
    """Return the boolean value of a GRIB key that is 0 or 1; False if the message does not contain the key."""
    eccodes = import_eccodes()
    return bool(eccodes.codes_is_defined(handle, key) and eccodes.codes_get(handle, key, int))


def _describe_unsupported_grid(grid_type: str) -> str:
    """Return the reason why a type of grid cannot be used, and advice, as text to follow the name of a variable."""
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
        "regrid it, for example with cdo remapbil,r360x181 IN OUT"
    )
