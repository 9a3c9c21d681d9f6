"""Decoding of a GRIB record, with checks that it is the requested record and that its values are usable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credit.calendar import Calendar
from credit.data.formats.grib.messages import GribGrid, Message, read_messages, read_values
from credit.data.formats.units import Conversion, find_conversion, is_same_unit, normalise_units
from credit.errors import DataError
from credit.realtime.fetch.message_check import has_zero_run
from credit.realtime.fetch.records import RecordRequest

# Standard gravity in m s-2 (WMO, Guide to Instruments and Methods of Observation, WMO-No. 8). Geopotential in m2 s-2 is
# geopotential height in gpm multiplied by this value.
STANDARD_GRAVITY = 9.80665


@dataclass(frozen=True)
class DecodedField:
    """Decoded field of a GRIB record.

    Attributes:
        values_HW: (H, W) float32 values in `units`, with rows from north to south and NaN for missing values.
        units: units of the values, in the spelling of ecCodes.
        grid: latitudes and longitudes of the field.
    """

    values_HW: np.ndarray
    units: str
    grid: GribGrid


def read_record(path: Path, request: RecordRequest, minutes: int) -> DecodedField:
    """Decode the requested field of a record, and check that its values are usable.

    Args:
        path: file with one GRIB message, which may contain several fields.
        request: requested record.
        minutes: time of the analysis in minutes since 1900.

    Raises:
        DataError: if the record cannot be decoded; its parameter, level, time or step is not as requested; or it has
            values that an analysis cannot have.
    """
    try:
        messages = read_messages(path)
    except DataError as error:
        # The message of `error` names a temporary file and gives advice about files of the user, so it is replaced.
        raise DataError("the record cannot be decoded as GRIB") from error
    matches = [message for message in messages if message.parameter.name in request.short_names]
    if len(matches) != 1:
        names = ", ".join(message.parameter.name for message in messages)
        raise DataError(f"the record has the parameters {names}, not exactly one {' or '.join(request.short_names)}")
    message = matches[0]
    _require_same_field(message, request, minutes)
    if message.grid.problem is not None:
        raise DataError(message.grid.problem)
    try:
        points = read_values(path, [(message.offset, message.field_number)])[0]
    except Exception as error:
        # ecCodes has a separate error class for each problem with the packed values.
        raise DataError(f"the values cannot be unpacked ({error})") from error
    grid = message.grid
    if len(points) != len(grid.lat) * len(grid.lon):
        raise DataError(f"the record has {len(points)} values for {len(grid.lat)} x {len(grid.lon)} cells")
    if grid.order is not None:
        points = points[grid.order]
    values_HW = points.reshape(len(grid.lat), len(grid.lon))
    _require_usable_values(values_HW, request)
    # Quantities such as humidity and ice have the natural minimum 0, which may be the value in large areas.
    smallest = np.nanmin(values_HW)
    if smallest != 0 and has_zero_run(path.read_bytes()):
        raise DataError(f"a part of the record is empty, so its cells would be decoded as {smallest:g}")
    return DecodedField(values_HW, message.parameter.attributes.get("units", ""), grid)


def find_field_conversion(units: str, target_units: str, request: RecordRequest) -> Conversion | None:
    """Return the conversion of a decoded field to the units of the model; None if the units are equal.

    Geopotential height (gpm) is converted to geopotential with standard gravity.

    Raises:
        DataError: if the units measure different quantities.
        ConfigError: if the package cf-units is needed and not installed.
    """
    if not target_units or is_same_unit(units, target_units):
        return None
    is_height = normalise_units(units) == "m" and request.short_names[0] in ("gh", "orog")
    if is_height and normalise_units(target_units) == "m2 s-2":
        return Conversion(STANDARD_GRAVITY, 0.0)
    return find_conversion(units, target_units, request.name, "the record")


def _require_same_field(message: Message, request: RecordRequest, minutes: int) -> None:
    """Raise DataError if a message does not have the level, time and step of the request.

    Raises:
        DataError: if the level, time or step differs; the message names it.
    """
    keys = message.key_values
    if not request.is_at_level(message):
        level = f"{keys.get('typeOfLevel')} {message.level:g}"
        raise DataError(f"the record is at {level}, not at {request.index_level}")
    if message.minutes != minutes:
        calendar = Calendar()
        raise DataError(f"the record is valid at {calendar.format(message.minutes)}, not {calendar.format(minutes)}")
    if keys.get("step") != 0 or keys.get("stepType") != "instant":
        raise DataError(
            f"the record is a forecast or a value over a period (step {keys.get('step')} h, {keys.get('stepType')}), "
            "not an analysis"
        )


def _require_usable_values(values_HW: np.ndarray, request: RecordRequest) -> None:
    """Raise DataError if a field has infinite values or forbidden missing values, or is constant.

    Raises:
        DataError: if the field breaks one of these rules; the message states the rule.
    """
    is_missing_HW = np.isnan(values_HW)
    num_missing = int(is_missing_HW.sum())
    if num_missing == values_HW.size or (num_missing and not request.may_be_missing):
        raise DataError(f"{num_missing} of {values_HW.size} values are missing")
    valid = values_HW[~is_missing_HW]
    if not np.isfinite(valid).all():
        raise DataError("the record has infinite values")
    if valid.min() == valid.max():
        raise DataError(f"the value is {valid[0]:g} everywhere; the record is damaged or a placeholder")
