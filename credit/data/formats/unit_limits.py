"""Limits of physically plausible values for each physical quantity and unit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from credit.data.formats.units import normalise_units

# Quantity -> units -> least and greatest plausible value.
_QUANTITY_LIMITS = {
    "temperature": {"K": (80.0, 400.0), "degC": (-193.0, 127.0)},
    "pressure at the surface or at sea level": {"Pa": (2e4, 1.2e5), "hPa": (200.0, 1200.0)},
    "specific humidity": {"kg kg-1": (-0.05, 0.2), "g kg-1": (-50.0, 200.0)},
    "wind": {"m s-1": (-500.0, 500.0)},
    "geopotential": {"m2 s-2": (-1e5, 5e6)},
    "geopotential height": {"m": (-1e4, 5e5)},
}
# These limits detect fractions whose values are in per cent. Unlike a quantity in `_QUANTITY_LIMITS`, a fraction may
# also have units that are not listed here.
_FRACTION_LIMITS = {"area fraction": {"1": (-0.01, 1.01), "%": (-1.0, 101.0)}}
# Quantity -> names of its variables: standard names, and usual short names for files without a standard name.
_QUANTITIES = {
    "temperature": ("air_temperature", "surface_temperature", "sea_surface_temperature", "t", "t2m", "sst", "skt"),
    "pressure at the surface or at sea level": (
        "air_pressure_at_mean_sea_level", "air_pressure_at_sea_level", "surface_air_pressure", "msl", "sp",
    ),
    "specific humidity": ("specific_humidity", "q"),
    "wind": ("eastward_wind", "northward_wind", "u", "v", "u10", "v10"),
    "geopotential": ("geopotential", "z"),
    "geopotential height": ("geopotential_height", "gh"),
    "area fraction": ("land_area_fraction", "land_binary_mask", "sea_area_fraction", "sea_ice_area_fraction"),
}  # fmt: skip
# Standard name or short name -> quantity.
_QUANTITY_OF: dict[str, str] = {}
for _quantity, _names in _QUANTITIES.items():
    _QUANTITY_OF |= dict.fromkeys(_names, _quantity)
# All units of the quantities in `_QUANTITY_LIMITS`.
_UNITS_OF_QUANTITIES = set().union(*_QUANTITY_LIMITS.values())
# Limits of all other quantities with these units. The limits are wide, because they include these quantities: K:
# temperature differences, and potential temperature at 100 km (2e5 K); m2 s-2: energy per mass such as CAPE; kg kg-1:
# water in peat; Pa: pressure in the deep ocean, and stress; J m-2: sums over months.
_UNIT_LIMITS = {
    "K": (-1e6, 1e6),
    "degC": (-1e6, 1e6),
    "Pa": (-1e9, 1e9),
    "hPa": (-1e7, 1e7),
    "Pa s-1": (-1e4, 1e4),
    "kg kg-1": (-1.0, 100.0),
    "g kg-1": (-1e3, 1e5),
    "m s-1": (-1e4, 1e4),
    "m": (-2e4, 1e7),
    "mm": (-1e6, 1e7),
    "%": (-1e4, 1e5),
    "m2 s-2": (-1e6, 1e8),
    "s-1": (-1e3, 1e3),
    "W m-2": (-1e5, 1e5),
    "J m-2": (-1e14, 1e14),
    "kg m-2": (-1e7, 1e8),
    "kg m-2 s-1": (-1e3, 1e3),
    "m3 m-3": (-10.0, 10.0),
}
# Limits in the thermosphere (pressures up to `_THERMOSPHERE_HPA`). The limits also apply to all model levels, because
# the pressure of model levels is unknown here.
_THERMOSPHERE_LIMITS = {
    "temperature": {"K": (80.0, 3000.0), "degC": (-193.0, 2700.0)},
    "wind": {"m s-1": (-2000.0, 2000.0)},
}
_THERMOSPHERE_HPA = 1e-3
# At pressures up to this value, the height of a pressure level is known within a factor of 2. At higher pressures,
# heights are close to 0, so a tolerance in m is used instead.
_UNCERTAIN_HEIGHT_HPA = 700.0
_HEIGHT_TOLERANCE = 2000.0


def find_quantity(name: str, attributes: Mapping[str, str]) -> str:
    """Return the physical quantity of a variable, such as ``temperature``; empty if it is unknown.

    Args:
        name: name of the variable, which is used only if there is no standard name.
        attributes: attributes of the variable; only ``standard_name`` is used.
    """
    return _QUANTITY_OF.get(attributes.get("standard_name") or name, "")


def has_limits(quantity: str, units: str) -> bool:
    """Return True if there are specific limits for a quantity in given units.

    The limits in `_UNIT_LIMITS`, which apply to all quantities with the same units, are ignored.

    Args:
        quantity: quantity that `find_quantity` returned.
        units: units in the spelling of `normalise_units`.
    """
    return units in (_QUANTITY_LIMITS | _FRACTION_LIMITS).get(quantity, {})


def describe_wrong_units(name: str, attributes: Mapping[str, str]) -> str | None:
    """Return an error message if a variable has the units of a different quantity, else None.

    The result is also None if the units or the quantity of the variable are unknown.

    Args:
        name: name of the variable.
        attributes: attributes of the variable; only ``units`` and ``standard_name`` are used.
    """
    quantity = find_quantity(name, attributes)
    units = normalise_units(attributes.get("units", ""))
    # Only the units of a different known quantity are an error; unusual units may be correct.
    is_known = quantity in _QUANTITY_LIMITS and units in _UNITS_OF_QUANTITIES
    if not is_known or units in _QUANTITY_LIMITS[quantity]:
        return None
    quantity_name = attributes.get("standard_name") or name
    allowed_units = " or ".join(_QUANTITY_LIMITS[quantity])
    return (
        f'{name}: its units are "{attributes["units"]}", but {quantity_name} is a {quantity} ({allowed_units}); '
        "correct units or standard_name in the files, or data.sources.N.rename; or set "
        f"data.variable_options.{name}.valid_range: [least, greatest] to read it as it is"
    )


def find_limits(quantity: str, units: str, pressure: float | None) -> tuple[float, float]:
    """Return the least and the greatest plausible value of a quantity; -inf and inf if there are no limits.

    The limits of geopotential and geopotential height are computed from the height of the pressure level. This height
    is about 7.5 km times ln(1013 hPa / p) in an atmosphere of about 256 K.

    Args:
        quantity: quantity that `find_quantity` returned; empty if the quantity is unknown.
        units: units of the values in the spelling of `normalise_units`.
        pressure: pressure of the level in hPa; NaN if the pressure is unknown, None for a variable without levels.
    """
    # A comparison with NaN is false, so the limits of the thermosphere apply to model levels.
    may_be_thermosphere = pressure is not None and not pressure > _THERMOSPHERE_HPA
    if may_be_thermosphere and units in _THERMOSPHERE_LIMITS.get(quantity, {}):
        return _THERMOSPHERE_LIMITS[quantity][units]
    # Factor from height in m to the quantity: gravity for geopotential, 1 for geopotential height.
    gravity = {"m2 s-2": 9.80665, "m": 1.0}.get(units)
    on_pressure_level = pressure is not None and np.isfinite(pressure)
    if quantity.startswith("geopotential") and on_pressure_level and gravity is not None:
        height = 7500.0 * np.log(1013.0 / pressure)
        if pressure <= _UNCERTAIN_HEIGHT_HPA:
            return 0.5 * height * gravity, 2.0 * height * gravity
        return (height - _HEIGHT_TOLERANCE) * gravity, (height + _HEIGHT_TOLERANCE) * gravity
    # The limits of the quantity have priority over the general limits for the units.
    limits = (_QUANTITY_LIMITS | _FRACTION_LIMITS).get(quantity, {}).get(units)
    return limits or _UNIT_LIMITS.get(units) or (-np.inf, np.inf)
