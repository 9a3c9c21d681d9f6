"""Units: standard spelling of common units, and conversion with UDUNITS, the library that defines the units of CF."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from credit.errors import ConfigError, DataError
from credit.utils.installation import install_command

# Spelling in lower case -> standard spelling. The table contains spellings that UDUNITS does not support or reads as a
# different unit, such as C (coulomb) and mb (millibarn).
_SPELLINGS = {
    "kelvin": "K", "k": "K", "celsius": "degC", "c": "degC", "degc": "degC", "deg_c": "degC", "degree_celsius": "degC",
    "degrees_celsius": "degC", "pascal": "Pa", "pa": "Pa", "hpa": "hPa", "millibar": "hPa", "mbar": "hPa", "mb": "hPa",
    "m/s": "m s-1", "m2/s2": "m2 s-2", "j kg-1": "m2 s-2", "j/kg": "m2 s-2", "gpm": "m", "metre": "m", "meter": "m",
    "gpdm": "dam", "gpdam": "dam", "dagpm": "dam", "m of water equivalent": "m", "kg/kg": "kg kg-1", "g/kg": "g kg-1",
    "(0 - 1)": "1", "fraction": "1",
}  # fmt: skip

# Common units, which are converted without the package cf-units: unit -> (quantity, factor, offset). The value in the
# first unit of the quantity is factor * value + offset.
_COMMON_UNITS = {
    "K": ("temperature", 1.0, 0.0), "degC": ("temperature", 1.0, 273.15),
    "Pa": ("pressure", 1.0, 0.0), "hPa": ("pressure", 100.0, 0.0),
    "m": ("length", 1.0, 0.0), "mm": ("length", 1e-3, 0.0), "km": ("length", 1e3, 0.0),
    "m s-1": ("speed", 1.0, 0.0), "km h-1": ("speed", 1 / 3.6, 0.0),
    "kg kg-1": ("mixing ratio", 1.0, 0.0), "g kg-1": ("mixing ratio", 1e-3, 0.0),
    "1": ("fraction", 1.0, 0.0), "%": ("fraction", 0.01, 0.0),
}  # fmt: skip

# A unit's name with an optional power, or the number 1. Any other number is part of the unit and is not changed.
_FACTOR = re.compile(r"([A-Za-z]+)(-?[0-9]+)?|1")
# The sign of a power after a name. After a number, the sign is kept: 10**5 is not 105.
_POWER_SIGN = re.compile(r"(?<=[A-Za-z])(\*\*|\^)")
# A multiplication sign. A point between two digits is a decimal point and does not match.
_PRODUCT_SIGN = re.compile(r"(?<![0-9])\.|\.(?![0-9])|\*")


def normalise_units(units: str) -> str:
    """Return the standard spelling of units; ``kg/m^2/s``, for example, becomes ``kg m-2 s-1``.

    Products and quotients of powers are rewritten. Units with other numbers, such as ``1e-3 m``, keep their spelling.
    """
    text = " ".join(_POWER_SIGN.sub("", units).split())
    if text.lower() in _SPELLINGS:
        return _SPELLINGS[text.lower()]
    powers = []
    # The first product is the numerator; each further product follows a solidus.
    for number, product in enumerate(text.split("/")):
        factors = _PRODUCT_SIGN.sub(" ", product).split()
        # A string that is not a product of plain powers is returned unchanged.
        if not factors:
            return text
        for position, factor in enumerate(factors):
            match = _FACTOR.fullmatch(factor)
            if match is None:
                return text
            name, power = match.groups()
            if name is None:
                # The factor 1 has no effect.
                continue
            # Only the factor that follows a solidus directly is in the denominator.
            exponent = int(power or 1)
            is_divisor = number > 0 and position == 0
            if is_divisor:
                exponent = -exponent
            if exponent == 1:
                powers.append(name)
            else:
                powers.append(f"{name}{exponent}")
    text = " ".join(powers) or "1"
    return _SPELLINGS.get(text.lower(), text)


def is_same_unit(first: str, second: str) -> bool:
    """Return True if two spellings, such as ``m2 s-2`` and ``m^2/s^2``, mean the same unit.

    Unusual spellings are compared with UDUNITS. If UDUNITS is not installed, they are treated as different units.
    """
    if normalise_units(first) == normalise_units(second):
        return True
    try:
        return find_conversion(first, second, "", "") is None
    except (ConfigError, DataError):
        return False


def is_convertible(first: str, second: str) -> bool:
    """Return True if a unit, such as ``degC``, can be converted to a second unit, such as ``K``.

    The result is also True if UDUNITS is not installed, because the conversion then cannot be checked.
    """
    try:
        find_conversion(first, second, "", "")
    except ConfigError:
        return True
    except DataError:
        return False
    return True


@dataclass(frozen=True)
class Conversion:
    """Conversion from source units to target units: ``scale * value + offset``.

    Attributes:
        scale: number of target units in one source unit.
        offset: the value 0 in source units, expressed in target units.
    """

    scale: float
    offset: float

    def apply(self, fields: np.ndarray) -> np.ndarray:
        """Return fields of any shape in the target units, computed in float64 and rounded to float32."""
        return (np.asarray(fields, dtype=np.float64) * self.scale + self.offset).astype(np.float32)


class ExpConversion:
    """Conversion from the natural logarithm of pressure in Pa to pressure in Pa."""

    def apply(self, fields: np.ndarray) -> np.ndarray:
        """Return pressure in Pa, float64, for fields of ln(p / Pa) of any shape."""
        return np.exp(np.asarray(fields, dtype=np.float64))


def find_conversion(source_units: str, target_units: str, name: str, origin: str, key: str = "") -> Conversion | None:
    """Return the conversion of a variable from the units of a file to the units of the run; None if they are equal.

    Args:
        source_units: units in the file, empty if the file has none.
        target_units: units of the run.
        name: name of the variable, for error messages.
        origin: name of the file, for error messages.
        key: config key that sets the target units, for error messages; empty for
            ``data.variable_options.NAME.units``.

    Raises:
        ConfigError: if `target_units` is not a unit, or the package cf-units is required but not installed.
        DataError: if the file has no units, or units that cannot be converted to `target_units` by a linear formula.
    """
    key = key or f"data.variable_options.{name}.units"
    if not source_units.strip():
        raise DataError(
            f'{origin}: {name} has no units, so it cannot be converted to "{target_units}" ({key}); write its units '
            f"into the file, or remove {key} if you are sure of the units"
        )
    # Equal spellings do not need UDUNITS, which is an optional package.
    if normalise_units(source_units) == normalise_units(target_units):
        return None
    conversion = _find_common_conversion(normalise_units(source_units), normalise_units(target_units))
    if conversion is not None:
        return conversion
    purpose = f'{origin}: {name} is in "{source_units}", not "{target_units}" ({key})'
    source_unit = _parse_units(source_units, purpose)
    target_unit = _parse_units(target_units, purpose)
    if target_unit is None:
        raise ConfigError(
            f'{key}: "{target_units}" is not a unit that UDUNITS supports; {name} of {origin} cannot be converted from '
            f'"{source_units}"; write for example K, Pa, m s-1 or kg m-2'
        )
    if source_unit is None or not source_unit.is_convertible(target_unit):
        reason = f'and "{target_units}" measure different quantities'
        if source_unit is None:
            reason = "is not a unit that UDUNITS supports"
        raise DataError(
            f'{origin}: {name} is in "{source_units}" and cannot be converted to "{target_units}" ({key}): '
            f'"{source_units}" {reason}; correct the units in the file, or {key}'
        )
    # Two values define a linear conversion. The third value detects nonlinear conversions, such as from decibels.
    converted_values = [float(source_unit.convert(value, target_unit)) for value in (0.0, 1.0, 2.0)]
    at_0, at_1, at_2 = converted_values
    if not np.isclose(at_2 - at_1, at_1 - at_0, rtol=1e-9, atol=0.0):
        raise DataError(
            f'{origin}: {name} is in "{source_units}", which is not proportional to "{target_units}" ({key}); remove it'
        )
    if (at_0, at_1) == (0.0, 1.0):
        return None
    return Conversion(at_1 - at_0, at_0)


def _find_common_conversion(source_units: str, target_units: str) -> Conversion | None:
    """Return the conversion between two units of `_COMMON_UNITS`; None if a unit is uncommon or the quantities differ.

    Args:
        source_units: standard spelling of the source units.
        target_units: standard spelling of the target units.
    """
    if source_units not in _COMMON_UNITS or target_units not in _COMMON_UNITS:
        return None
    source_quantity, source_factor, source_offset = _COMMON_UNITS[source_units]
    target_quantity, target_factor, target_offset = _COMMON_UNITS[target_units]
    if source_quantity != target_quantity:
        return None
    return Conversion(source_factor / target_factor, (source_offset - target_offset) / target_factor)


def _parse_units(units: str, purpose: str) -> Any | None:
    """Return units as an object of the package cf-units; None if UDUNITS does not support the units.

    Args:
        units: the units as a string.
        purpose: beginning of the error message if cf-units is not installed: the reason why units must be converted.

    Raises:
        ConfigError: if cf-units is not installed.
    """
    try:
        import cf_units
    except ImportError as error:
        raise ConfigError(
            f"{purpose}; converting units needs the package cf-units; install it with: {install_command('units')}"
        ) from error
    spelling = " ".join(units.split()).lower()
    try:
        with cf_units.suppress_errors():
            return cf_units.Unit(_SPELLINGS.get(spelling, units))
    except ValueError:
        return None


def require_numeric_packing(name: str, attributes: Mapping[str, Any], origin: str) -> None:
    """Raise DataError if the packing attributes of a variable are not numbers, so that it cannot be unpacked.

    Args:
        name: name of the variable.
        attributes: attributes of the variable, with ``scale_factor`` and ``add_offset`` if it is packed.
        origin: name of the file, for error messages.

    Raises:
        DataError: if ``scale_factor`` or ``add_offset`` is not a single number.
    """
    for key in ("scale_factor", "add_offset"):
        value = attributes.get(key, 0.0)
        if np.size(value) != 1 or np.asarray(value).dtype.kind not in "iuf":
            raise DataError(
                f"{origin}: the attribute {key} of {name} is {value!r}, but it must be one number; correct it, for "
                f"example with ncatted -a {key},{name},m,d,NUMBER FILE"
            )
