"""How fields on the run's levels are made of fields on a file's levels, and derived ones of others.

Variables are brought from level to level linearly in ln p. Between the lowest level and the ground, and below it:

- temperature is linear in pressure down to the ground and then follows a lapse rate, after Trenberth et al. (1993);
- geopotential that is derived goes on hydrostatically with that temperature;
- all else (winds, humidity) keeps the value of the lowest level, as ECMWF does.

Below the lowest of a source's pressure levels temperature follows the standard lapse rate, and geopotential goes on
linearly in ln p.

Arrays of a block of cells are (K, N...) on a file's levels and (L, N...) on the run's; those of the ground are (N...).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from credit.data.formats.units import Conversion, ExpConversion, plain
from credit.data.sources.required_variables import FIELD, SURFACE_GEOPOTENTIAL, SURFACE_PRESSURE
from credit.errors import DataError
from credit.physics import thermodynamics
from credit.physics.vertical import Column, VerticalInterpolator, place

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
# of formulas' inputs: unit -> scale and offset to the first
_UNITS = {
    "temperature": {"K": (1.0, 0.0), "degC": (1.0, 273.15)},
    "specific_humidity": {"kg kg-1": (1.0, 0.0), "1": (1.0, 0.0), "g kg-1": (1e-3, 0.0)},
    "eastward_wind": {"m s-1": (1.0, 0.0)},
    "northward_wind": {"m s-1": (1.0, 0.0)},
    SURFACE_PRESSURE: {"Pa": (1.0, 0.0), "hPa": (100.0, 0.0)},
    SURFACE_GEOPOTENTIAL: {"m2 s-2": (1.0, 0.0), "m": (thermodynamics.GRAVITY, 0.0)},
}
# what is not simply held below the ground, by standard_name or usual names
_EXTRAPOLATED = {
    "temperature": ("air_temperature", "t", "ta", "temp", "temperature"),
    "geopotential": ("geopotential", "geopotential_height", "z", "z3", "zg", "gh", "hgt"),
}
# of a block of columns, so that a few float64 copies of it stay small beside a column of float32
_BLOCK_VALUES = 300_000
_LEAST_SURFACE_PA, _MOST_SURFACE_PA = 2e4, 1.2e5


def derived_attributes(kind: str) -> dict[str, str]:
    """Return units, standard_name and long_name of a derived variable."""
    return dict(zip(("units", "standard_name", "long_name"), _ATTRIBUTES[kind], strict=True))


def interpolation_kind(name: str, standard_name: str) -> str:
    """Return ``temperature`` or ``geopotential`` for what is not simply held below the ground, else an empty text."""
    called = standard_name or name.lower()
    return next((quantity for quantity, names in _EXTRAPOLATED.items() if called in names), "")


def si_conversion(role: str, name: str, attributes: Mapping[str, str], where: str) -> Conversion | ExpConversion | None:
    """Return what brings an input of a formula to its unit; None where it has it.

    Args:
        role: what it is in the formula.
        name: its name in the file.
        attributes: there.
        where: the file, for messages.

    Raises:
        DataError: for no units, or others than are known.
    """
    units = plain(attributes.get("units", ""))
    about = f"{name} {attributes.get('long_name', '')}".lower()
    if role == SURFACE_PRESSURE and units not in _UNITS[role] and ("lnsp" in about or "logarithm" in about):
        return ExpConversion()
    if units not in _UNITS[role]:
        known = " or ".join(_UNITS[role])
        raise DataError(f'{where}: {name} is in "{units}", but as {role} it must be in {known}; correct its units')
    scale, offset = _UNITS[role][units]
    return None if (scale, offset) == (1.0, 0.0) else Conversion(scale, offset)


def make(
    kind: str | None, quantity: str, column: Column | None, inputs: Mapping[str, np.ndarray], back: Conversion | None
) -> np.ndarray:
    """Return fields (L, h, w) float32 of one time on a file's grid, in blocks of rows.

    Args:
        kind: what is derived; None for a variable that is interpolated.
        quantity: of such a variable, see `interpolation_kind`.
        column: from the file's levels to the run's; None where the levels are the run's, or there are none.
        inputs: role -> (K, h, w) or, of the ground, (h, w); in SI where a formula uses them.
        back: the conversion to SI that was applied to an interpolated variable, to be undone.

    Raises:
        DataError: for levels above the top, a surface pressure that is none, or what is missing to extrapolate.
    """
    levels, height, width = inputs[FIELD].shape
    pressure = inputs.get(SURFACE_PRESSURE)
    if pressure is not None and not (
        np.nanmin(pressure) > _LEAST_SURFACE_PA and np.nanmax(pressure) < _MOST_SURFACE_PA
    ):
        raise DataError(
            f"surface pressure runs from {np.nanmin(pressure):g} to {np.nanmax(pressure):g} Pa; look at the units of "
            "what data.sources.N.vertical.surface_pressure names, in a forecast inference.surface_pressure"
        )
    at_once = max(1, _BLOCK_VALUES // (levels * width))
    blocks = []
    for first in range(0, height, at_once):
        rows = slice(first, first + at_once)
        block = {role: field[..., rows, :] for role, field in inputs.items()}
        values = _derive(kind, column, block) if kind else _interpolate(quantity, column, block)
        if back is not None:
            values = (values - back.offset) / back.scale
        blocks.append(values.astype(np.float32))
    return np.concatenate(blocks, axis=-2)


def _interpolate(quantity: str, column: Column, block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return an own variable of a source on the run's levels."""
    placement = _place(column, block)
    if not quantity or not placement.below.any():
        return placement.held(block[FIELD])
    if quantity == "temperature":
        return _temperature(column, placement, block)
    if column.levels.b.any():
        below = _names(column, placement.below)
        raise DataError(
            f"{below} is below the lowest level of the source in some cells, where geopotential needs a temperature: "
            "derive it (data.variable_options.NAME.derive: geopotential)"
        )
    return placement.continued(block[FIELD])


def _derive(kind: str, column: Column | None, block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a derived variable on the run's levels."""
    if kind == "mean_sea_level_pressure":
        surface, lowest = block[SURFACE_PRESSURE], block[FIELD][0]
        below = column.levels.lowest(surface)
        return thermodynamics.sea_level_pressure(surface, lowest, below, block[SURFACE_GEOPOTENTIAL])[None]
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
    return values[list(column.rows)] if column.wanted is None else _place(column, block).held(values)


def _geopotential(column: Column, block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return geopotential on the run's levels.

    To levels of pressure it is brought from the edges of the layers, where it is exact for the layers' temperatures,
    with a temperature that is linear in ln p from edge to edge.
    """
    levels, surface, ground = column.levels, block[SURFACE_PRESSURE], block[SURFACE_GEOPOTENTIAL]
    lowest = block[FIELD][-1].astype(np.float64)
    virtual = thermodynamics.virtual_temperature(block[FIELD].astype(np.float64), block["specific_humidity"])
    upper, lower = levels.edges(surface)
    at_levels, at_edges = thermodynamics.geopotential(virtual, upper, lower, ground)
    if column.wanted is None:
        return at_levels[list(column.rows)]
    # the uppermost level, then every lower edge; the last is the ground
    top = thermodynamics.R_DRY * virtual[:1] * np.log(lower[0] / levels.take([0]).lowest(surface))
    values = np.concatenate([at_edges[:1] + top, at_edges])
    temperature = np.concatenate([virtual[:1], 0.5 * (virtual[:-1] + virtual[1:]), virtual[-1:]])
    placement = place(levels.lower_edges(), column.wanted, surface)
    found = placement.curved(values, -thermodynamics.R_DRY * temperature)
    bottom = levels.lowest(surface)
    for row, below in enumerate(placement.below):
        if below.any():
            deep = thermodynamics.extrapolate_geopotential(placement.pressure[row], surface, lowest, bottom, ground)
            found[row] = np.where(below, deep, found[row])
    return found


def _temperature(column: Column, placement: VerticalInterpolator, block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return temperature with what lies below the lowest level."""
    found = placement.held(block[FIELD])
    surface, lowest, bottom = _surface(block), block[FIELD][-1], column.levels.lowest(_surface(block))
    if not column.levels.b.any():
        standard = lowest * (placement.pressure / bottom) ** thermodynamics.ALPHA
        return np.where(placement.below, standard, found)
    under_ground = placement.pressure > surface
    if under_ground.any() and SURFACE_GEOPOTENTIAL not in block:
        raise DataError(
            f"{_names(column, under_ground)} is below the ground in some cells, where temperature is extrapolated with "
            "the height of the ground: set data.sources.N.vertical.surface_geopotential"
        )
    ground = block.get(SURFACE_GEOPOTENTIAL, np.zeros_like(surface))
    for row, below in enumerate(placement.below):
        if below.any():
            deep = thermodynamics.extrapolate_temperature(placement.pressure[row], surface, lowest, bottom, ground)
            found[row] = np.where(below, deep, found[row])
    return found


def _surface(block: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return surface pressure, or anything of its shape where pressure levels do without."""
    return block.get(SURFACE_PRESSURE, np.zeros(block[FIELD].shape[1:]))


def _place(column: Column, block: Mapping[str, np.ndarray]) -> VerticalInterpolator:
    return place(column.levels, column.wanted, _surface(block))


def _names(column: Column, where: np.ndarray) -> str:
    """Return the wanted levels, in words, of which a mask (L, N...) has some cell."""
    rows = np.flatnonzero(where.reshape(len(where), -1).any(axis=1))
    return f"level {', '.join(f'{value:g}' for value in column.wanted.values[rows])}"
