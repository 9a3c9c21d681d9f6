"""Vertical interpolation of fields from the levels of a file to those of the run, and derived variables.

Interpolation is linear in ln p. Between the lowest level and the ground, and below it:

- temperature is linear in pressure down to the ground and then follows a lapse rate, after Trenberth et al. (1993);
- derived geopotential continues hydrostatically with this temperature;
- all other variables (winds, humidity) keep the value of the lowest level, as in the method of ECMWF.

Below the lowest pressure level of a source, temperature follows the standard lapse rate, and geopotential continues
linearly in ln p.

Arrays of a block of cells are (K, N...) on the levels of a file, (L, N...) on those of the run, and (N...) at the
ground.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from credit.data.formats.units import Conversion, ExpConversion, plain
from credit.data.sources.required_variables import FIELD, SURFACE_GEOPOTENTIAL, SURFACE_PRESSURE
from credit.errors import DataError
from credit.physics import thermodynamics
from credit.physics.vertical import Column, VerticalInterpolator, interpolation_weights

_ATTRIBUTES = {
    "geopotential": ("m2 s-2", "geopotential", "Geopotential"),
    "mean_sea_level_pressure": ("Pa", "air_pressure_at_mean_sea_level", "Mean sea level pressure"),
    "relative_humidity": ("%", "relative_humidity", "Relative humidity over water and ice"),
    "relative_humidity_water": ("%", "relative_humidity", "Relative humidity over water"),
    "wind_speed": ("m s-1", "wind_speed", "Wind speed"),
}
_SATURATION = {
    "relative_humidity": thermodynamics.saturation_pressure_mixed,
    "relative_humidity_water": thermodynamics.saturation_pressure_water,
}
# Units of the inputs of formulas: role -> unit -> scale and offset to SI units.
_UNITS = {
    "temperature": {"K": (1.0, 0.0), "degC": (1.0, 273.15)},
    "specific_humidity": {"kg kg-1": (1.0, 0.0), "1": (1.0, 0.0), "g kg-1": (1e-3, 0.0)},
    "eastward_wind": {"m s-1": (1.0, 0.0)},
    "northward_wind": {"m s-1": (1.0, 0.0)},
    SURFACE_PRESSURE: {"Pa": (1.0, 0.0), "hPa": (100.0, 0.0)},
    SURFACE_GEOPOTENTIAL: {"m2 s-2": (1.0, 0.0), "m": (thermodynamics.GRAVITY, 0.0)},
}
# Names of the variables that are extrapolated below the ground: standard names and usual names.
_EXTRAPOLATED = {
    "temperature": ("air_temperature", "t", "ta", "temp", "temperature"),
    "geopotential": ("geopotential", "geopotential_height", "z", "z3", "zg", "gh", "hgt"),
}
# Number of values in a block, so that its float64 copies need little memory and stay in the cache.
_BLOCK_VALUES = 300_000
_MIN_SURFACE_PA = 2e4
_MAX_SURFACE_PA = 1.2e5


def derived_attributes(kind: str) -> dict[str, str]:
    """Return units, standard_name and long_name of a derived variable."""
    return dict(zip(("units", "standard_name", "long_name"), _ATTRIBUTES[kind], strict=True))


def interpolation_kind(name: str, standard_name: str) -> str:
    """Return ``temperature`` or ``geopotential`` for variables that are extrapolated below the ground, else ""."""
    for quantity, names in _EXTRAPOLATED.items():
        if (standard_name or name.lower()) in names:
            return quantity
    return ""


def si_conversion(
    role: str, name: str, attributes: Mapping[str, str], origin: str
) -> Conversion | ExpConversion | None:
    """Return the conversion of an input of a formula to SI units; None if it has them.

    Args:
        role: its role in the formula.
        name: its name in the file.
        attributes: its attributes in the file.
        origin: the file, for messages.

    Raises:
        DataError: for missing or unknown units.
    """
    units = plain(attributes.get("units", ""))
    about = f"{name} {attributes.get('long_name', '')}".lower()
    if role == SURFACE_PRESSURE and units not in _UNITS[role] and ("lnsp" in about or "logarithm" in about):
        return ExpConversion()
    if units not in _UNITS[role]:
        known_units = " or ".join(_UNITS[role])
        raise DataError(
            f'{origin}: {name} is in "{units}", but as {role} it must be in {known_units}; correct its units'
        )
    scale, offset = _UNITS[role][units]
    if (scale, offset) == (1.0, 0.0):
        return None
    return Conversion(scale, offset)


def compute_derived(
    kind: str | None, quantity: str, column: Column | None, inputs: Mapping[str, np.ndarray], back: Conversion | None
) -> np.ndarray:
    """Compute a derived or interpolated variable at one time, (L, h, w) float32 on the grid of the file.

    It is computed in blocks of rows, which stay in the processor's cache.

    Args:
        kind: the derived quantity; None for a variable that is interpolated.
        quantity: kind of interpolation, see `interpolation_kind`.
        column: from the levels of the file to those of the run; None if they are the same, or there are none.
        inputs: role -> (K, h, w) or, for the ground, (h, w); in SI units if a formula uses them.
        back: the conversion to SI units that was applied to an interpolated variable and is inverted here.

    Raises:
        DataError: for levels above the top, an impossible surface pressure, or a missing input of an extrapolation.
    """
    levels, height, width = inputs[FIELD].shape
    pressure = inputs.get(SURFACE_PRESSURE)
    if pressure is not None and not (np.nanmin(pressure) > _MIN_SURFACE_PA and np.nanmax(pressure) < _MAX_SURFACE_PA):
        raise DataError(
            f"surface pressure runs from {np.nanmin(pressure):g} to {np.nanmax(pressure):g} Pa; look at the units of "
            "what data.sources.N.vertical.surface_pressure names, in a forecast inference.surface_pressure"
        )
    rows_at_once = max(1, _BLOCK_VALUES // (levels * width))
    blocks = []
    for start in range(0, height, rows_at_once):
        rows = slice(start, start + rows_at_once)
        block = {role: field[..., rows, :] for role, field in inputs.items()}
        values = _derive(kind, column, block) if kind else _interpolate(quantity, column, block)
        if back is not None:
            values = (values - back.offset) / back.scale
        blocks.append(values.astype(np.float32))
    return np.concatenate(blocks, axis=-2)


def _interpolate(quantity: str, column: Column, block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a variable of the source on the levels of the run."""
    interpolator = _interpolator(column, block)
    if not quantity or not interpolator.below.any():
        return interpolator.constant(block[FIELD])
    if quantity == "temperature":
        return _temperature(column, interpolator, block)
    if column.levels.b.any():
        level_names = _describe_levels(column, interpolator.below)
        raise DataError(
            f"{level_names} is below the lowest level of the source in some cells, where geopotential needs a "
            "temperature: derive it (data.variable_options.NAME.derive: geopotential)"
        )
    return interpolator.linear(block[FIELD])


def _derive(kind: str, column: Column | None, block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a derived variable on the levels of the run."""
    if kind == "mean_sea_level_pressure":
        surface_pressure = block[SURFACE_PRESSURE]
        lowest_pressure = column.levels.lowest(surface_pressure)
        return thermodynamics.sea_level_pressure(
            surface_pressure, block[FIELD][0], lowest_pressure, block[SURFACE_GEOPOTENTIAL]
        )[None]
    if kind == "geopotential":
        return _geopotential(column, block)
    if kind == "wind_speed":
        values = np.hypot(block[FIELD], block["northward_wind"])
    else:
        pressure = column.levels.pressure(_surface(block))
        saturation = _SATURATION[kind](block[FIELD].astype(np.float64))
        values = thermodynamics.relative_humidity(block["specific_humidity"], pressure, saturation)
    if column is None:
        return values
    if column.target is None:
        return values[list(column.rows)]
    return _interpolator(column, block).constant(values)


def _geopotential(column: Column, block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return geopotential on the levels of the run.

    To pressure levels it is interpolated from the edges of the layers, where it is exact for the temperatures of the
    layers, with a temperature that is linear in ln p from edge to edge.
    """
    levels = column.levels
    surface = block[SURFACE_PRESSURE]
    ground = block[SURFACE_GEOPOTENTIAL]
    lowest = block[FIELD][-1].astype(np.float64)
    virtual = thermodynamics.virtual_temperature(block[FIELD].astype(np.float64), block["specific_humidity"])
    upper, lower = levels.edges(surface)
    at_levels, at_edges = thermodynamics.geopotential(virtual, upper, lower, ground)
    if column.target is None:
        return at_levels[list(column.rows)]
    # Values at the uppermost level, then at the lower edge of every layer; the last edge is the ground.
    top = thermodynamics.R_DRY * virtual[:1] * np.log(lower[0] / levels.take([0]).lowest(surface))
    values = np.concatenate([at_edges[:1] + top, at_edges])
    temperature = np.concatenate([virtual[:1], 0.5 * (virtual[:-1] + virtual[1:]), virtual[-1:]])
    interpolator = interpolation_weights(levels.lower_edges(), column.target, surface)
    geopotential = interpolator.hydrostatic(values, -thermodynamics.R_DRY * temperature)
    lowest_pressure = levels.lowest(surface)
    for row, is_below in enumerate(interpolator.below):
        if is_below.any():
            extrapolated = thermodynamics.extrapolate_geopotential(
                interpolator.pressure[row], surface, lowest, lowest_pressure, ground
            )
            geopotential[row] = np.where(is_below, extrapolated, geopotential[row])
    return geopotential


def _temperature(column: Column, interpolator: VerticalInterpolator, block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return temperature on the levels of the run, extrapolated below the lowest level of the source."""
    temperature = interpolator.constant(block[FIELD])
    surface = _surface(block)
    lowest = block[FIELD][-1]
    lowest_pressure = column.levels.lowest(surface)
    if not column.levels.b.any():
        # On pressure levels the ground is not known, so the standard lapse rate continues from the lowest level.
        standard = lowest * (interpolator.pressure / lowest_pressure) ** thermodynamics.ALPHA
        return np.where(interpolator.below, standard, temperature)
    is_below_ground = interpolator.pressure > surface
    if is_below_ground.any() and SURFACE_GEOPOTENTIAL not in block:
        raise DataError(
            f"{_describe_levels(column, is_below_ground)} is below the ground in some cells, where temperature is "
            "extrapolated with the height of the ground: set data.sources.N.vertical.surface_geopotential"
        )
    ground = block.get(SURFACE_GEOPOTENTIAL, np.zeros_like(surface))
    for row, is_below in enumerate(interpolator.below):
        if is_below.any():
            extrapolated = thermodynamics.extrapolate_temperature(
                interpolator.pressure[row], surface, lowest, lowest_pressure, ground
            )
            temperature[row] = np.where(is_below, extrapolated, temperature[row])
    return temperature


def _surface(block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return surface pressure, or zeros of its shape for pressure levels, which do not need it."""
    return block.get(SURFACE_PRESSURE, np.zeros(block[FIELD].shape[1:]))


def _interpolator(column: Column, block: Mapping[str, np.ndarray]) -> VerticalInterpolator:
    return interpolation_weights(column.levels, column.target, _surface(block))


def _describe_levels(column: Column, mask_LN: np.ndarray) -> str:
    """Return the values of the levels of the run for which a mask is true in some cell."""
    rows = np.flatnonzero(mask_LN.reshape(len(mask_LN), -1).any(axis=1))
    return f"level {', '.join(f'{value:g}' for value in column.target.values[rows])}"
