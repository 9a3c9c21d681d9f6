"""Units: one spelling of the usual ones, and conversion by UDUNITS, the library behind the units of CF."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from credit.errors import ConfigError, DataError
from credit.utils.installation import install_command

# what UDUNITS does not know, or takes for something else (C is coulomb, mb millibarn)
_SPELLINGS = {
    "kelvin": "K", "k": "K", "celsius": "degC", "c": "degC", "degc": "degC", "deg_c": "degC", "degree_celsius": "degC",
    "degrees_celsius": "degC", "pascal": "Pa", "pa": "Pa", "hpa": "hPa", "millibar": "hPa", "mbar": "hPa", "mb": "hPa",
    "m/s": "m s-1", "m2/s2": "m2 s-2", "j kg-1": "m2 s-2", "j/kg": "m2 s-2", "gpm": "m", "metre": "m", "meter": "m",
    "gpdm": "dam", "gpdam": "dam", "dagpm": "dam", "m of water equivalent": "m", "kg/kg": "kg kg-1", "g/kg": "g kg-1",
    "(0 - 1)": "1", "fraction": "1",
}  # fmt: skip

# A unit's name with its power, or the number 1 alone; any other number is part of the unit and stays as it is.
_FACTOR = re.compile(r"([A-Za-z]+)(-?[0-9]+)?|1")
# The sign of a power after a name. After a number it must stay: 10**5 is not 105.
_POWER_SIGN = re.compile(r"(?<=[A-Za-z])(\*\*|\^)")
# A point that multiplies; one between two digits is decimal.
_PRODUCT_SIGN = re.compile(r"(?<![0-9])\.|\.(?![0-9])|\*")


def plain(units: str) -> str:
    """Return one spelling of units; products and quotients of plain powers become ``kg m-2 s-1``."""
    text = " ".join(_POWER_SIGN.sub("", units).split())
    if text.lower() in _SPELLINGS:
        return _SPELLINGS[text.lower()]
    parts = [_PRODUCT_SIGN.sub(" ", part).split() for part in text.split("/")]
    factors = [_FACTOR.fullmatch(factor) for part in parts for factor in part]
    if not all(parts) or not all(factors):
        return text
    powers = []
    for number, part in enumerate(parts):
        for position, factor in enumerate(part):
            name, power = _FACTOR.fullmatch(factor).groups()
            if name is None:
                continue
            # what follows a solidus directly is divided by
            divides = number > 0 and position == 0
            power = int(power or 1) * (-1 if divides else 1)
            powers.append(name if power == 1 else f"{name}{power}")
    text = " ".join(powers) or "1"
    return _SPELLINGS.get(text.lower(), text)


def is_same_unit(first: str, second: str) -> bool:
    """Return whether two spellings stand for one unit; UDUNITS, where installed, decides about unusual spellings."""
    if plain(first) == plain(second):
        return True
    try:
        return find_conversion(first, second, "", "") is None
    except (ConfigError, DataError):
        return False


def is_convertible(first: str, second: str) -> bool:
    """Return whether two units may measure one quantity; without UDUNITS they are taken to do so."""
    try:
        find_conversion(first, second, "", "")
    except ConfigError:
        return True
    except DataError:
        return False
    return True


@dataclass(frozen=True)
class Conversion:
    """From one unit to another: ``scale * value + offset``."""

    scale: float
    offset: float

    def apply(self, fields: np.ndarray) -> np.ndarray:
        """Return converted fields, float32."""
        return (np.asarray(fields, dtype=np.float64) * self.scale + self.offset).astype(np.float32)


class ExpConversion:
    """From the natural logarithm of a number of Pa to Pa."""

    def apply(self, fields: np.ndarray) -> np.ndarray:
        """Return pressure, float64."""
        return np.exp(np.asarray(fields, dtype=np.float64))


def find_conversion(have: str, wanted: str, name: str, origin: str, key: str = "") -> Conversion | None:
    """Return the conversion of a variable to the units of the run's data, None where nothing changes.

    Args:
        have: its units in the file, empty where the file has none.
        wanted: those of the data.
        name: the variable.
        origin: the file.
        key: what says so, by default ``data.variable_options.NAME.units``.

    Raises:
        ConfigError: if `wanted` is no unit, or cf-units is needed and not installed.
        DataError: if the file has no units, or such that cannot be converted.
    """
    key = key or f"data.variable_options.{name}.units"
    if not have.strip():
        raise DataError(
            f'{origin}: {name} has no units, so it cannot be converted to "{wanted}" ({key}); write its units into the '
            f"file, or leave {key} out if you are sure of them"
        )
    if plain(have) == plain(wanted):
        return None
    what = f'{origin}: {name} is in "{have}", not "{wanted}" ({key})'
    there, here = _parse(have, what), _parse(wanted, what)
    if here is None:
        raise ConfigError(
            f'{key}: "{wanted}" is no unit that UDUNITS knows, so {name} of {origin} cannot be converted from "{have}"; '
            "write for example K, Pa, m s-1 or kg m-2"
        )
    if there is None or not there.is_convertible(here):
        why = "is no unit that UDUNITS knows" if there is None else f'and "{wanted}" measure different quantities'
        raise DataError(
            f'{origin}: {name} is in "{have}" and cannot be converted to "{wanted}" ({key}): "{have}" {why}; correct '
            f"the units in the file, or {key}"
        )
    zero, one, two = (float(there.convert(value, here)) for value in (0.0, 1.0, 2.0))
    if not np.isclose(two - one, one - zero, rtol=1e-9, atol=0.0):
        raise DataError(
            f'{origin}: {name} is in "{have}", which is not proportional to "{wanted}" ({key}); leave it out'
        )
    return None if (zero, one) == (0.0, 1.0) else Conversion(one - zero, zero)


def _parse(units: str, what: str) -> Any | None:
    """Return a unit of cf-units, None where UDUNITS does not know it; `what` says what is to be converted."""
    try:
        import cf_units
    except ImportError as error:
        raise ConfigError(
            f"{what}; converting units needs the package cf-units; install it with: {install_command('units')}"
        ) from error
    try:
        with cf_units.suppress_errors():
            return cf_units.Unit(_SPELLINGS.get(" ".join(units.split()).lower(), units))
    except ValueError:
        return None


def require_packing(name: str, attributes: Mapping[str, Any], origin: str) -> None:
    """Refuse packed values that cannot be unpacked.

    Args:
        name: the variable.
        attributes: with scale_factor and add_offset, where it has them.
        origin: the file, for messages.

    Raises:
        DataError: if one of the two is no number.
    """
    for key in ("scale_factor", "add_offset"):
        value = attributes.get(key, 0.0)
        if np.size(value) != 1 or np.asarray(value).dtype.kind not in "iuf":
            raise DataError(
                f"{origin}: the attribute {key} of {name} is {value!r}, but it must be one number; correct it, for "
                f"example with ncatted -a {key},{name},m,d,NUMBER FILE"
            )
