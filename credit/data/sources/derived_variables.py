"""Vertical interpolation of fields from the levels of a file to the levels of the run, and derived variables.

Interpolation is linear in ln p (p is pressure). Fields are extrapolated below the lowest model level, and below the
surface, as follows:

- temperature is linear in pressure down to the surface and then follows a lapse rate, after Trenberth et al. (1993);
- derived geopotential is integrated hydrostatically with this temperature;
- all other variables (winds, humidity) keep the value of the lowest level, as in the method of ECMWF.

Below the lowest pressure level of a source, temperature follows the standard lapse rate, and geopotential continues
linearly in ln p.

Letters of shapes: K levels of a file and L levels of the run, both from the top down; h and w rows and columns of the
grid of the file. ``N...`` are the dimensions (rows of the block, w) of a block of rows. Surface fields have no level
dimension.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from credit.data.formats.units import Conversion, ExpConversion, normalise_units
from credit.data.sources.required_variables import FIELD, SURFACE_GEOPOTENTIAL, SURFACE_PRESSURE
from credit.errors import DataError
from credit.physics import thermodynamics
from credit.physics.vertical import LevelMapping, VerticalInterpolator, build_interpolator

# Units, standard_name and long_name of each derived variable.
_ATTRIBUTES = {
    "geopotential": ("m2 s-2", "geopotential", "Geopotential"),
    "mean_sea_level_pressure": ("Pa", "air_pressure_at_mean_sea_level", "Mean sea level pressure"),
    "relative_humidity": ("%", "relative_humidity", "Relative humidity over water and ice"),
    "relative_humidity_water": ("%", "relative_humidity", "Relative humidity over water"),
    "wind_speed": ("m s-1", "wind_speed", "Wind speed"),
}
# Formula of saturation vapour pressure for each kind of relative humidity.
_SATURATION = {
    "relative_humidity": thermodynamics.saturation_pressure_mixed,
    "relative_humidity_water": thermodynamics.saturation_pressure_water,
}
# Scale and offset that convert each input of a formula to SI units, by the role and the units of the input.
_UNITS = {
    "temperature": {"K": (1.0, 0.0), "degC": (1.0, 273.15)},
    "specific_humidity": {"kg kg-1": (1.0, 0.0), "1": (1.0, 0.0), "g kg-1": (1e-3, 0.0)},
    "eastward_wind": {"m s-1": (1.0, 0.0)},
    "northward_wind": {"m s-1": (1.0, 0.0)},
    SURFACE_PRESSURE: {"Pa": (1.0, 0.0), "hPa": (100.0, 0.0)},
    SURFACE_GEOPOTENTIAL: {"m2 s-2": (1.0, 0.0), "m": (thermodynamics.GRAVITY, 0.0)},
}
# Names of the variables that are extrapolated below the surface: standard names and usual names.
_EXTRAPOLATED = {
    "temperature": ("air_temperature", "t", "ta", "temp", "temperature"),
    "geopotential": ("geopotential", "geopotential_height", "z", "z3", "zg", "gh", "hgt"),
}
# Largest number of values in a block of rows, chosen so that the float64 copies of a block stay in the CPU cache.
_BLOCK_VALUES = 300_000
# Limits of surface pressure in Pa. Values outside the limits have wrong units, or are of a different variable.
_MIN_SURFACE_PA = 2e4
_MAX_SURFACE_PA = 1.2e5


def build_derived_attributes(kind: str) -> dict[str, str]:
    """Return units, standard_name and long_name of a derived variable.

    Args:
        kind: the derived quantity, a value of ``data.variable_options.NAME.derive``.
    """
    return dict(zip(("units", "standard_name", "long_name"), _ATTRIBUTES[kind], strict=True))


def find_extrapolated_quantity(name: str, standard_name: str) -> str:
    """Return the quantity that determines how a variable is extrapolated below the surface.

    Args:
        name: name of the variable; it is used only if the variable has no standard name.
        standard_name: standard name of the variable; empty if it has none.

    Returns:
        ``temperature``, ``geopotential``, or "" for a variable that keeps the value of the lowest level.
    """
    for quantity, names in _EXTRAPOLATED.items():
        if (standard_name or name.lower()) in names:
            return quantity
    return ""


def find_si_conversion(
    role: str, name: str, attributes: Mapping[str, str], origin: str
) -> Conversion | ExpConversion | None:
    """Return the conversion of an input of a formula to SI units; None if the input is in SI units.

    Args:
        role: role of the input in the formula, such as ``temperature`` or ``surface_pressure``.
        name: name of the input in the file.
        attributes: attributes of the input in the file; ``units`` and ``long_name`` are used.
        origin: name of the file, for error messages.

    Raises:
        DataError: if the units are missing or not known for this role.
    """
    units = normalise_units(attributes.get("units", ""))
    name_and_description = f"{name} {attributes.get('long_name', '')}".lower()
    # Archives of model levels contain the logarithm of surface pressure, which has no units of pressure.
    is_logarithm = "lnsp" in name_and_description or "logarithm" in name_and_description
    if role == SURFACE_PRESSURE and units not in _UNITS[role] and is_logarithm:
        return ExpConversion()
    if units not in _UNITS[role]:
        allowed_units = " or ".join(_UNITS[role])
        raise DataError(
            f'{origin}: {name} is in "{units}", but the units of {role} must be {allowed_units}; correct the units'
        )
    scale, offset = _UNITS[role][units]
    if (scale, offset) == (1.0, 0.0):
        return None
    return Conversion(scale, offset)


def compute_derived(
    kind: str | None,
    quantity: str,
    level_mapping: LevelMapping | None,
    inputs: Mapping[str, np.ndarray],
    si_conversion: Conversion | None,
) -> np.ndarray:
    """Return a derived or interpolated variable at one time, (L, h, w) float32 on the grid of the file.

    The variable is computed in blocks of rows that fit into the CPU cache.

    Args:
        kind: the derived quantity (``data.variable_options.NAME.derive``); None for a variable that is interpolated.
        quantity: result of `find_extrapolated_quantity`, which determines the extrapolation below the surface.
        level_mapping: mapping from the levels of the file to the levels of the run; None if the levels are the same, or
            if there are no levels.
        inputs: mapping from the role of each input to its field: (K, h, w), or (h, w) for a surface field. Inputs of
            formulas are in SI units.
        si_conversion: conversion to SI units that was applied to an interpolated variable, and that is inverted in the
            result; None if the variable was not converted.

    Raises:
        DataError: if a level of the run is above the uppermost level of the file, surface pressure has impossible
            values, or an extrapolation needs an input that is missing.
    """
    num_levels, height, width = inputs[FIELD].shape
    pressure = inputs.get(SURFACE_PRESSURE)
    if pressure is not None:
        lowest = np.nanmin(pressure)
        highest = np.nanmax(pressure)
        # A comparison with NaN is false, so a field without values is also an error.
        if not (lowest > _MIN_SURFACE_PA and highest < _MAX_SURFACE_PA):
            raise DataError(
                f"surface pressure ranges from {lowest:g} to {highest:g} Pa; check the units of the variable that "
                "data.sources.N.vertical.surface_pressure names, or in a forecast inference.surface_pressure"
            )
    rows_at_once = max(1, _BLOCK_VALUES // (num_levels * width))
    blocks = []
    for start in range(0, height, rows_at_once):
        rows = slice(start, start + rows_at_once)
        block = {role: field[..., rows, :] for role, field in inputs.items()}
        # In both cases, the result is on the levels of the run.
        if kind is None:
            values = _interpolate_block(quantity, level_mapping, block)
        else:
            values = _derive_block(kind, level_mapping, block)
        if si_conversion is not None:
            values = (values - si_conversion.offset) / si_conversion.scale
        blocks.append(values.astype(np.float32))
    return np.concatenate(blocks, axis=-2)


def _interpolate_block(quantity: str, level_mapping: LevelMapping, block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a variable of the file interpolated to the levels of the run in a block of rows, (L, N...).

    Args:
        quantity: result of `find_extrapolated_quantity`, which determines the extrapolation below the surface.
        level_mapping: mapping from the levels of the file to the levels of the run.
        block: mapping from the role of each input to its values in the block, (K, N...), or (N...) for surface fields.

    Raises:
        DataError: if an extrapolation below the surface needs an input that is missing.
    """
    interpolator = build_interpolator(level_mapping.levels, level_mapping.target_levels, _surface_pressure_or_0(block))
    if not quantity or not interpolator.is_below_source.any():
        return interpolator.interpolate_and_hold(block[FIELD])
    if quantity == "temperature":
        return _interpolate_temperature(level_mapping, interpolator, block)
    # Below the lowest pressure level, geopotential continues linearly in ln p. On hybrid levels this is an error.
    if level_mapping.levels.b.any():
        level_names = _describe_levels(level_mapping, interpolator.is_below_source)
        raise DataError(
            f"{level_names} is below the lowest level of the source in some cells, where geopotential can only be "
            "computed from temperature: derive geopotential (data.variable_options.NAME.derive: geopotential)"
        )
    return interpolator.interpolate_and_extrapolate(block[FIELD])


def _derive_block(kind: str, level_mapping: LevelMapping | None, block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a derived variable on the levels of the run in a block of rows, (L, N...).

    Args:
        kind: the derived quantity.
        level_mapping: see `compute_derived`.
        block: mapping from the role of each input to its values in the block, (K, N...), or (N...) for surface fields.
    """
    # The next two formulas need no interpolation afterwards.
    if kind == "mean_sea_level_pressure":
        surface_pressure = block[SURFACE_PRESSURE]
        lowest_pressure = level_mapping.levels.lowest_pressure(surface_pressure)
        sea_level_pressure = thermodynamics.sea_level_pressure(
            surface_pressure, block[FIELD][0], lowest_pressure, block[SURFACE_GEOPOTENTIAL]
        )
        return sea_level_pressure[None]
    if kind == "geopotential":
        return _derive_geopotential(level_mapping, block)
    # All other variables are computed on the levels of the file, and then interpolated to the levels of the run.
    if kind == "wind_speed":
        values = np.hypot(block[FIELD], block["northward_wind"])
    else:
        pressure = level_mapping.levels.pressure(_surface_pressure_or_0(block))
        saturation = _SATURATION[kind](block[FIELD].astype(np.float64))
        values = thermodynamics.relative_humidity(block["specific_humidity"], pressure, saturation)
    if level_mapping is None:
        return values
    if level_mapping.target_levels is None:
        return values[list(level_mapping.level_indices)]
    interpolator = build_interpolator(level_mapping.levels, level_mapping.target_levels, _surface_pressure_or_0(block))
    return interpolator.interpolate_and_hold(values)


def _derive_geopotential(level_mapping: LevelMapping, block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return geopotential in m2 s-2 on the levels of the run in a block of rows, (L, N...).

    Geopotential is integrated hydrostatically on the levels of the file. If `level_mapping` has target levels, the
    result is then interpolated to them from the edges of the layers, where it is exact for the given layer
    temperatures. Temperature is assumed to be linear in ln p between two edges.

    Args:
        level_mapping: mapping from the levels of the file to the levels of the run.
        block: mapping from the role to the values of temperature (role `FIELD`), specific humidity, surface pressure
            and surface geopotential, (K, N...), or (N...) for surface fields.
    """
    # Hydrostatic integration on the levels of the file.
    levels = level_mapping.levels
    surface_pressure = block[SURFACE_PRESSURE]
    surface_geopotential = block[SURFACE_GEOPOTENTIAL]
    lowest_temperature = block[FIELD][-1].astype(np.float64)
    virtual = thermodynamics.virtual_temperature(block[FIELD].astype(np.float64), block["specific_humidity"])
    upper, lower = levels.edge_pressures(surface_pressure)
    at_levels, at_edges = thermodynamics.geopotential(virtual, upper, lower, surface_geopotential)
    if level_mapping.target_levels is None:
        return at_levels[list(level_mapping.level_indices)]
    # Geopotential at the uppermost level, and then at the lower edge of every layer; the last edge is the surface.
    uppermost_pressure = levels.select([0]).lowest_pressure(surface_pressure)
    top_thickness = thermodynamics.R_DRY * virtual[:1] * np.log(lower[0] / uppermost_pressure)
    values = np.concatenate([at_edges[:1] + top_thickness, at_edges])
    # Temperature at the same points: the outermost layers at both ends, and the means of two layers in between.
    temperature = np.concatenate([virtual[:1], 0.5 * (virtual[:-1] + virtual[1:]), virtual[-1:]])
    interpolator = build_interpolator(levels.lower_edges(), level_mapping.target_levels, surface_pressure)
    # In hydrostatic balance, the derivative of geopotential with respect to ln p is -R T.
    geopotential = interpolator.interpolate_hydrostatic(values, -thermodynamics.R_DRY * temperature)
    # Extrapolation below the surface, level by level, because most levels are above the surface.
    lowest_pressure = levels.lowest_pressure(surface_pressure)
    for row, is_below in enumerate(interpolator.is_below_source):
        if is_below.any():
            extrapolated = thermodynamics.extrapolate_geopotential(
                interpolator.pressure[row], surface_pressure, lowest_temperature, lowest_pressure, surface_geopotential
            )
            geopotential[row] = np.where(is_below, extrapolated, geopotential[row])
    return geopotential


def _interpolate_temperature(
    level_mapping: LevelMapping, interpolator: VerticalInterpolator, block: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return temperature in K interpolated to the levels of the run in a block of rows, (L, N...).

    Below the lowest level of the file, temperature is extrapolated.

    Args:
        level_mapping: mapping from the levels of the file to the levels of the run.
        interpolator: interpolator built from `level_mapping` and the surface pressure of the block.
        block: mapping from the role to the values of temperature (role `FIELD`) and, on hybrid levels, of surface
            pressure and surface geopotential; (K, N...), or (N...) for surface fields.

    Raises:
        DataError: if a level is below the surface and `block` has no surface geopotential.
    """
    temperature = interpolator.interpolate_and_hold(block[FIELD])
    surface_pressure = _surface_pressure_or_0(block)
    lowest_temperature = block[FIELD][-1]
    lowest_pressure = level_mapping.levels.lowest_pressure(surface_pressure)
    if not level_mapping.levels.b.any():
        # On pressure levels the surface is not known, so the standard lapse rate starts at the lowest level.
        extrapolated = lowest_temperature * (interpolator.pressure / lowest_pressure) ** thermodynamics.ALPHA
        return np.where(interpolator.is_below_source, extrapolated, temperature)
    is_below_ground = interpolator.pressure > surface_pressure
    if is_below_ground.any() and SURFACE_GEOPOTENTIAL not in block:
        level_names = _describe_levels(level_mapping, is_below_ground)
        raise DataError(
            f"{level_names} is below the ground in some cells, where temperature is extrapolated with the height of "
            "the ground: set data.sources.N.vertical.surface_geopotential"
        )
    # Between the lowest level and the surface, the height of the surface has no effect.
    surface_geopotential = block.get(SURFACE_GEOPOTENTIAL, np.zeros_like(surface_pressure))
    for row, is_below in enumerate(interpolator.is_below_source):
        if is_below.any():
            extrapolated = thermodynamics.extrapolate_temperature(
                interpolator.pressure[row], surface_pressure, lowest_temperature, lowest_pressure, surface_geopotential
            )
            temperature[row] = np.where(is_below, extrapolated, temperature[row])
    return temperature


def _surface_pressure_or_0(block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return surface pressure in Pa (N...), or zeros if `block` has no surface pressure (on pressure levels)."""
    return block.get(SURFACE_PRESSURE, np.zeros(block[FIELD].shape[1:]))


def _describe_levels(level_mapping: LevelMapping, mask_LN: np.ndarray) -> str:
    """Return a phrase that lists the levels on which a mask is True in any cell, such as ``level 1000, 925``.

    Args:
        level_mapping: mapping whose target levels are those of the run.
        mask_LN: (L, N...) bool.
    """
    rows = np.flatnonzero(mask_LN.reshape(len(mask_LN), -1).any(axis=1))
    level_names = [f"{value:g}" for value in level_mapping.target_levels.values[rows]]
    return f"level {', '.join(level_names)}"
