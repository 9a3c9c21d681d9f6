"""Checks of values: fill values that the file does not declare, and values outside the limits of their units.

`ValueRules.apply` checks every value that is read from a source file once, in the units of the file and before any
computation. Therefore all fields from `credit.data.sources.source_reader` are checked. The limits are physical bounds
that also hold in the stratosphere, soil and ocean. They detect wrong units and fill values, not unusual weather.

Letters of shapes: L levels, h rows and w columns of the grid of the file, F fill values; ``...`` are leading dimensions
such as time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from credit.config.sections.data import DataConfig
from credit.data.formats.unit_limits import describe_wrong_units, find_limits, find_quantity, has_limits
from credit.data.formats.units import Conversion, normalise_units
from credit.errors import DataError

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

# Physical values are smaller; the default fill value of netCDF for real numbers, 9.96921e36, is larger.
_MAX_MAGNITUDE = 1e30
# Smaller fill values: common choices of programs and archives, and the defaults of netCDF for integers.
_FILL_VALUES = (
    -99.0, -99.9, -99.99, -999.0, -999.9, -999.99, -9999.0, -9999.9, -99999.0, -999999.0, -9.99e8, -32767.0, -32768.0,
    -2147483647.0, -2147483648.0, -9223372036854775806.0, -1e20, 1e15, 1e20, 9.99e20, 9.999e20,
)  # fmt: skip
# Fill values of packed integers. 32767 is not included, because packing programs map the greatest value to it.
_PACKED_FILL_VALUES = (-32768.0, -32767.0, -9999.0, -999.0)


@dataclass(frozen=True)
class ImplausibleValues:
    """Description of the implausible values in one field.

    Attributes:
        index: indices of the field along the dimensions before the level, such as time; may be empty.
        level_index: index of the field's level among all levels of the variable.
        cells: (h, w) bool, True where a value is implausible.
        value: the first implausible value, in the units of the file.
        is_fill: True if the implausible values are fill values, False if they are outside the limits.
    """

    index: tuple[int, ...]
    level_index: int
    cells: np.ndarray
    value: float
    is_fill: bool


@dataclass(frozen=True)
class ValueRules:
    """Rules that check the values of one variable in one file.

    Attributes:
        levels: (L,) levels of the run in ``data.level_units``; (None,) for a variable without levels.
        limits: float64 least and greatest plausible value in the units of the file: (L, 2) for each level, or (1, 2)
            for all levels.
        description: quantity and units of the limits, for error messages.
        fill_values: (F,) float64 values that are treated as fill values if they are far from all other values.
        tolerances: (F,) float64 largest difference at which a value is treated as equal to each fill value.
        num_unpacked_fill_values: number of entries at the beginning of `fill_values` that are recognised even if they
            fill an entire field. The remaining entries are fill values of packed integers, which are recognised only in
            a field with at least two other values.
        valid_range: least and greatest value that the config declares, in the units of the file. Values in this range
            are accepted, and all other values are treated as missing. If None, the limits apply.
        name: name of the variable if ``data.variable_options`` can contain options for it, else empty.
    """

    levels: tuple[float | None, ...]
    limits: np.ndarray
    description: str
    fill_values: np.ndarray
    tolerances: np.ndarray
    num_unpacked_fill_values: int
    valid_range: tuple[float, float] | None
    name: str

    def apply(self, values: np.ndarray, levels: slice = slice(None)) -> tuple[np.ndarray, ImplausibleValues | None]:
        """Check values that were read from the file.

        Args:
            values: values (..., L, h, w) in the units of the file; the array is not changed.
            levels: slice of all levels of the variable that selects the L levels of `values`.

        Returns:
            The values, with NaN outside `valid_range`; and a description of the first field with implausible values,
            or None if there is no such field.
        """
        lowest, highest = _find_extremes(values)
        # A valid range in the config replaces all other rules.
        if self.valid_range is not None:
            least, greatest = self.valid_range
            with np.errstate(invalid="ignore"):
                if (lowest < least).any() or (highest > greatest).any():
                    values = np.where((values < least) | (values > greatest), np.nan, values)
            return values, None
        limits = self.limits if len(self.limits) == 1 else self.limits[levels]
        with np.errstate(invalid="ignore"):
            is_suspect = (lowest < limits[:, 0]) | (highest > limits[:, 1])
            for extreme in (lowest, highest):
                is_suspect |= np.abs(extreme) >= _MAX_MAGNITUDE
                is_suspect |= self._match_fill(extreme).any(axis=-1)
        # Checking the extremes of a field is fast. Only suspect fields are checked cell by cell.
        for index in np.argwhere(is_suspect):
            field_index = tuple(int(number) for number in index)
            field = values[field_index]
            # There is one pair of limits per level, or one pair for all levels.
            cells, is_fill = self._find_implausible_cells(field, limits[field_index[-1] % len(limits)])
            if cells.any():
                row = field_index[-1] + (levels.start or 0)
                return values, ImplausibleValues(field_index[:-1], row, cells, float(field[cells][0]), is_fill)
        return values, None

    def describe(self, implausible: ImplausibleValues, location: str = "") -> str:
        """Return a message about the implausible values of a field, with advice to the user.

        Args:
            implausible: description of the values that `apply` returned.
            location: string with the latitude and longitude of the first implausible value; empty if unknown.
        """
        # Parts of the message that are common to fill values and values outside the limits.
        value = f"{implausible.value:.6g}"
        suffix = f" at {location}" if location else ""
        count = f"{int(implausible.cells.sum())} of {implausible.cells.size} values are"
        key = f"data.variable_options.{self.name}"
        if implausible.is_fill:
            problem = f"{count} {value}, the first{suffix}: a fill value that the file does not declare as missing"
            advice = "declare it in the file (attribute _FillValue)"
            if self.name:
                advice += (
                    f", or set {key}.valid_range: [least, greatest], outside of which values are missing; "
                    f"{key}.missing and data.on_bad_time define how missing values are treated"
                )
        else:
            least, greatest = self.limits[implausible.level_index % len(self.limits)]
            problem = (
                f"{count} outside the limits of {self.description} ({least:g} to {greatest:g}), the first is "
                f"{value}{suffix}"
            )
            advice = "correct the values or their units in the file"
            if self.name:
                advice += (
                    f"; if they are fill values, or are correct, set {key}.valid_range: [least, greatest]: "
                    "values outside this range are missing, values inside are accepted"
                )
        return f"{problem}; {advice}"

    def _match_fill(self, values: np.ndarray) -> np.ndarray:
        """Return a mask (..., F) for values (...), True where a value equals a fill value within the tolerance."""
        distance = np.abs(np.asarray(values, dtype=np.float64)[..., None] - self.fill_values)
        return distance <= self.tolerances

    def _find_implausible_cells(self, field: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, bool]:
        """Find the implausible values of a field of one level.

        Args:
            field: (h, w) values of one level.
            limits: (2,) least and greatest plausible value.

        Returns:
            A mask (h, w) that is True at the implausible values; and a flag that is True if these values are fill
            values, and False if they are outside the limits.
        """
        # The reader reports infinite values in a separate message.
        is_finite = np.isfinite(field)
        is_fill = is_finite & (np.abs(field) >= _MAX_MAGNITUDE)
        if not is_fill.any():
            is_fill = self._find_isolated_fill(field, is_finite)
        if is_fill.any():
            return is_fill, True
        is_outside = (field < limits[0]) | (field > limits[1])
        return is_finite & is_outside, False

    def _find_isolated_fill(self, field: np.ndarray, is_finite: np.ndarray) -> np.ndarray:
        """Find the cells of a field that contain a fill value far from all other values.

        Only the smallest and the greatest value are tested. Such a value is isolated if its distance to the nearest
        other value exceeds the range of all other values. So a wind of -99 m/s among similar values is data.

        Args:
            field: (h, w) values of one level.
            is_finite: (h, w) bool, False where `field` is NaN or infinite.

        Returns:
            Mask (h, w) that is True at the isolated fill value; False everywhere if there is no such value.
        """
        no_cells = np.zeros(field.shape, dtype=bool)
        if not is_finite.any():
            return no_cells
        for extreme in (field[is_finite].min(), field[is_finite].max()):
            cells = is_finite & (field == extreme)
            other_values = field[is_finite & ~cells].astype(np.float64)
            is_match = self._match_fill(extreme)
            if not is_match.any():
                continue
            # Fill values of packed integers may be data, so the field must have at least two other values.
            is_uniform = not other_values.size or np.ptp(other_values) == 0.0
            if is_uniform and not is_match[: self.num_unpacked_fill_values].any():
                continue
            if not other_values.size or np.abs(other_values - extreme).min() > np.ptp(other_values):
                return cells
        return no_cells


def build_value_rules(
    name: str,
    attributes: Mapping[str, str],
    *,
    levels: Sequence[float | None] = (None,),
    level_units: str = "hPa",
    packing: tuple[float, float] | None = None,
    file_range: tuple[float, float] | None = None,
    valid_range: Sequence[float] | None = None,
    has_options: bool = True,
) -> ValueRules:
    """Build the rules for the values of a variable.

    Args:
        name: name of the variable.
        attributes: attributes of the variable in the file; ``units`` and ``standard_name`` are used.
        levels: levels of the values in `level_units`; (None,) if the values have no levels, or if the file and the run
            have different levels.
        level_units: ``data.level_units``.
        packing: scale and offset if the variable consists of packed integers and the file declares no fill value;
            else None.
        file_range: least and greatest value that the file declares, see `read_file_range`; None if there is no range.
        valid_range: least and greatest value that the config declares, in the units of the file, see
            `convert_range_to_file_units`; None if there is no range.
        has_options: True if ``data.variable_options`` can contain options for the variable.
    """
    # The quantity, or else the units, define the limits. A range in the file can only make the limits narrower.
    units = normalise_units(attributes.get("units", ""))
    quantity = find_quantity(name, attributes)
    limits = np.array([find_limits(quantity, units, _convert_to_hpa(level, level_units)) for level in levels])
    description = f"values in {units}"
    if has_limits(quantity, units):
        description = f"{quantity} in {units}"
    if file_range is not None:
        limits = np.stack([np.maximum(limits[:, 0], file_range[0]), np.minimum(limits[:, 1], file_range[1])], axis=1)
        description += " and of the valid range that the file declares"
    # Fill values of real numbers, and unpacked fill values of packed integers.
    fill_values = [np.array(_FILL_VALUES)]
    tolerances = [np.abs(fill_values[0]) * 1e-6]
    if packing is not None:
        scale, offset = packing
        unpacked = np.array(_PACKED_FILL_VALUES) * scale + offset
        # Packing programs map the least value of a file to -32767 or -32768. If this value is 0, as for rain and
        # snow, it is data, even if other values are rare.
        unpacked = unpacked[np.abs(unpacked) > 1.5 * abs(scale)]
        fill_values.append(unpacked)
        tolerances.append(np.full(len(unpacked), 0.25 * abs(scale)))
    if valid_range is not None:
        valid_range = tuple(valid_range)
    return ValueRules(
        levels=tuple(levels),
        limits=limits,
        description=description,
        fill_values=np.concatenate(fill_values),
        tolerances=np.concatenate(tolerances),
        num_unpacked_fill_values=len(_FILL_VALUES),
        valid_range=valid_range,
        name=name if has_options else "",
    )


def read_file_range(
    attributes: Mapping[str, object], packing: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Return the range of values that a file declares in the CF attributes valid_range, or valid_min and valid_max.

    For a packed variable, a range given as integers is in packed units, and a range given as real numbers is in
    unpacked units (netCDF User Guide). Ranges of variables with the attribute _Unsigned are ignored.

    Args:
        attributes: attributes of the variable in the file.
        packing: scale and offset of packed integers; None for a variable that is not packed.

    Returns:
        Least and greatest unpacked value, infinite for an undeclared bound; None if the file declares no range.
    """
    if "_Unsigned" in attributes:
        return None
    separate_bounds = [attributes.get("valid_min", np.nan), attributes.get("valid_max", np.nan)]
    bounds = np.atleast_1d(attributes.get("valid_range", separate_bounds))
    is_pair_of_numbers = bounds.shape == (2,) and bounds.dtype.kind in "iuf"
    if not is_pair_of_numbers or np.isnan(bounds.astype(np.float64)).all():
        return None
    values = bounds.astype(np.float64)
    if packing is not None and bounds.dtype.kind in "iu":
        scale, offset = packing
        values = np.sort(values * scale + offset)
    # Bounds are often rounded to the precision of the values.
    slack = 1e-6 * np.nanmax(np.abs(values))
    least = float(np.nan_to_num(values[0] - slack, nan=-np.inf))
    greatest = float(np.nan_to_num(values[1] + slack, nan=np.inf))
    return least, greatest


def convert_range_to_file_units(
    valid_range: Sequence[float] | None, conversion: Conversion | None
) -> Sequence[float] | None:
    """Return ``data.variable_options.NAME.valid_range`` in the units of the file; None if the config has no range.

    Args:
        valid_range: least and greatest value in the units of the run; None if the config has no range.
        conversion: conversion from file units to run units; None if the units are equal.
    """
    if valid_range is None or conversion is None:
        return valid_range
    # A negative scale reverses the order.
    return sorted((value - conversion.offset) / conversion.scale for value in valid_range)


def require_plausible_units(name: str, attributes: Mapping[str, str], origin: str) -> None:
    """Raise DataError if a variable has the units of a different quantity, such as a temperature in Pa.

    Args:
        name: name of the variable.
        attributes: attributes of the variable in the file; ``units`` and ``standard_name`` are used.
        origin: name of the file, for error messages.

    Raises:
        DataError: if the units do not fit the variable; the message lists the allowed units.
    """
    message = describe_wrong_units(name, attributes)
    if message is not None:
        raise DataError(f"{origin}: {message}")


def describe_implausible_variables(
    fields_CHW: np.ndarray, reader: FieldReader, conf: DataConfig, when: str
) -> list[str]:
    """Return a message for each variable of a store whose units or values are implausible.

    Args:
        fields_CHW: (C, H, W) stored fields of the C time-varying channels at one time, with missing values as NaN.
        reader: reader of the store, which provides channels, attributes and grid.
        conf: the ``data`` section of the config.
        when: the time as a string, for error messages.
    """
    # Variable -> message about its units, or about its first level with implausible values.
    messages: dict[str, str] = {}
    for field, channel in zip(fields_CHW, reader.channels.time_varying_stored, strict=True):
        if channel.variable in messages:
            continue
        attributes = reader.attributes.get(channel.variable, {})
        valid_range = conf.options_of(channel.variable).valid_range
        message = None
        # If the config declares a valid range, the units are accepted without a check.
        if valid_range is None:
            message = describe_wrong_units(channel.variable, attributes)
        if message is None:
            rules = build_value_rules(
                channel.variable,
                attributes,
                levels=[channel.level],
                level_units=conf.level_units,
                valid_range=valid_range,
            )
            _, implausible = rules.apply(field[None])
            if implausible is not None:
                message = f"{channel.name} at {when}: {rules.describe(implausible)}"
        if message is not None:
            messages[channel.variable] = message
    return list(messages.values())


def _convert_to_hpa(level: float | None, level_units: str) -> float | None:
    """Return the pressure of a level in hPa; NaN for a model level, whose pressure is unknown.

    Args:
        level: the level; None for a variable without levels, for which the result is None.
        level_units: units of `level`, see ``data.level_units``.
    """
    if level is None or level_units == "hPa":
        return level
    if level_units == "Pa":
        return level / 100.0
    return np.nan


def _find_extremes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the greatest value of each field, as two arrays (...) for fields (..., h, w).

    Missing values are ignored. The extremes of a field without valid values are NaN.
    """
    lowest = values.min(axis=(-2, -1))
    highest = values.max(axis=(-2, -1))
    if np.isnan(lowest).any():
        # `fmin` and `fmax` ignore missing values, but are slower.
        lowest = np.fmin.reduce(np.fmin.reduce(values, axis=-1), axis=-1)
        highest = np.fmax.reduce(np.fmax.reduce(values, axis=-1), axis=-1)
    return lowest, highest
