"""Plan of the GRIB2 messages of a forecast: parameter, levels, units and packing of each variable.

Shape suffixes: H latitude rows, W longitude columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from credit.data.formats.cf import match_levels
from credit.data.formats.units import Conversion
from credit.errors import ConfigError, DataError, did_you_mean
from credit.forecast.io.grib.options import GribOptions
from credit.forecast.io.grib.parameters import LEVEL_TYPES, GribParameter, find_grib_conversion, find_parameter
from credit.forecast.io.schema import ForecastSchema, OutputVariable

# Calendars that GRIB2 can represent: only calendars with real dates.
_CALENDARS = ("standard", "proleptic_gregorian")
# Perturbation number and number of members are stored in single bytes, where 255 means missing.
_MAX_MEMBERS = 254
# Statistical processes (code table 4.10).
MEAN = 0
SUM = 1
_PA_PER_HPA = 100.0


@dataclass(frozen=True)
class FixedSurface:
    """Level of a GRIB2 message, as encoded in section 4.

    Attributes:
        first_type: type of the first fixed surface (code table 4.5).
        second_type: type of the second fixed surface; 255 for none.
        scale: decimal scale of the value; None for a surface without a value.
        scaled_value: value of the first fixed surface x 10^scale, in SI units; None for a surface without a value.
    """

    first_type: int
    second_type: int
    scale: int | None
    scaled_value: int | None


@dataclass(frozen=True)
class FieldPlan:
    """Description of the messages of one variable.

    Attributes:
        variable: the variable.
        parameter: GRIB2 parameter of the variable.
        surfaces: level of each channel of the variable.
        conversion: conversion to the units of the parameter.
        process: `MEAN` or `SUM` over time; None for an instantaneous variable.
        precision: largest error of the packed values in the units of the parameter; None to use the number of bits from
            the config.
    """

    variable: OutputVariable
    parameter: GribParameter
    surfaces: tuple[FixedSurface, ...]
    conversion: Conversion
    process: int | None
    precision: float | None

    def describe(self) -> dict[str, object]:
        """Return the properties of the messages as JSON values, to detect files with different properties."""
        return {
            "parameter": list(self.parameter.numbers),
            "surfaces": [
                [surface.first_type, surface.second_type, surface.scale, surface.scaled_value]
                for surface in self.surfaces
            ],
            "scale": self.conversion.scale,
            "offset": self.conversion.offset,
            "process": self.process,
            "window_minutes": self.variable.window,
            "precision": self.precision,
        }


def plan_fields(schema: ForecastSchema, options: GribOptions) -> list[FieldPlan]:
    """Return the plan of the GRIB2 messages of each variable.

    Args:
        schema: content of each forecast.
        options: settings of GRIB2 files.

    Raises:
        ConfigError: if GRIB2 cannot represent a variable, a level, the calendar or the number of members, or if the
            settings name a variable that is not written. The message lists all variables with problems.
    """
    calendar = schema.calendar.name
    if calendar not in _CALENDARS:
        raise ConfigError(
            f"inference.format: grib2: the data have the calendar {calendar}, but GRIB2 supports only real dates "
            f"({', '.join(_CALENDARS)}); write netcdf or zarr"
        )
    if (schema.members or 1) > _MAX_MEMBERS:
        raise ConfigError(
            f"inference.ensemble.members: {schema.members}: GRIB2 supports at most {_MAX_MEMBERS} members; write "
            "netcdf or zarr"
        )
    names = [variable.name for variable in schema.variables]
    for key, settings in (("precision", options.conf.precision), ("parameters", options.conf.parameters)):
        for name in settings:
            if name not in names:
                raise ConfigError(f'inference.grib.{key}: "{name}" is not written{did_you_mean(name, names)}')
    plans = []
    problems = []
    for variable in schema.variables:
        try:
            plans.append(_plan_field(variable, schema, options))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return plans


def _plan_field(variable: OutputVariable, schema: ForecastSchema, options: GribOptions) -> FieldPlan:
    """Return the plan of the GRIB2 messages of one variable; see `plan_fields` for arguments and errors."""
    name = variable.name
    standard_name = variable.attributes.get("standard_name", "")
    has_levels = variable.level_dim is not None
    parameter = find_parameter(name, standard_name, has_levels, options.conf.parameters)
    process = None
    units = parameter.units
    if variable.window is not None:
        process = SUM if variable.attributes["cell_methods"] == "time: sum" else MEAN
    if process == SUM:
        if parameter.sum_units is None:
            raise ConfigError(
                f"inference.format: grib2: {name} is a sum over time, but the GRIB2 parameter {parameter.short_name} "
                f"({units}) is not; correct data.variable_options.{name}.temporal, or set "
                f"inference.grib.parameters.{name}"
            )
        units = parameter.sum_units
    conversion = find_grib_conversion(name, variable.attributes.get("units", ""), units, parameter)
    if has_levels:
        surfaces = _plan_levels(variable, schema, options)
    else:
        assert parameter.level_type is not None, "find_parameter returns a parameter with a level"
        surfaces = [_build_surface(parameter.level_type, parameter.level)]
    precision = options.conf.precision.get(name)
    if precision is not None:
        precision *= abs(conversion.scale)
    return FieldPlan(variable, parameter, tuple(surfaces), conversion, process, precision)


def _plan_levels(variable: OutputVariable, schema: ForecastSchema, options: GribOptions) -> list[FixedSurface]:
    """Return the fixed surface of each level of a variable on pressure or model levels.

    Args:
        variable: variable with a dimension of levels.
        schema: content of the forecast, with the values and units of the levels.
        options: settings of GRIB2 files, which give the numbers of model levels.

    Raises:
        ConfigError: if a model level has no number.
    """
    assert variable.level_dim is not None
    levels = schema.levels[variable.level_dim]
    if schema.level_units == "model_level":
        numbers = _find_model_level_numbers(variable.name, levels, options)
        return [_build_surface("hybrid", number) for number in numbers]
    hpa_per_unit = 1.0 if schema.level_units == "hPa" else 1.0 / _PA_PER_HPA
    return [_build_surface("isobaricInhPa", level * hpa_per_unit) for level in levels]


def _find_model_level_numbers(name: str, levels: Sequence[float], options: GribOptions) -> list[int]:
    """Return the numbers of model levels, counted from 1 at the top.

    If the coefficients of the model levels are known, the number of a level is its position in the list of
    coefficients. Otherwise, the number is the value of the level.

    Args:
        name: name of the variable, for messages.
        levels: values of the levels.
        options: settings of GRIB2 files, with the coefficients.

    Raises:
        ConfigError: if a level is not in the list of coefficients, or the value of a level is not a positive integer.
    """
    if options.model_levels is not None:
        try:
            rows = match_levels(options.model_levels.values, levels, name, "", "data.coefficients")
        except DataError as error:
            raise ConfigError(str(error)) from error
        return [row + 1 for row in rows]
    for level in levels:
        if level != int(level) or level < 1:
            raise ConfigError(
                f"inference.format: grib2: {name} is on the model level {level:g}, but GRIB2 numbers levels from 1; "
                "set data.coefficients, which gives the number of each level"
            )
    return [int(level) for level in levels]


def _build_surface(level_type: str, level: float | None) -> FixedSurface:
    """Return the GRIB2 fixed surface that represents a level.

    Args:
        level_type: type of level, a key of `LEVEL_TYPES`.
        level: value in hPa or m, or number of a model level; None for a type without a value.
    """
    first_type, second_type, has_value = LEVEL_TYPES[level_type]
    if not has_value:
        return FixedSurface(first_type, second_type, None, None)
    assert level is not None, "the config requires a level"
    value = float(level)
    if level_type == "isobaricInhPa":
        value *= _PA_PER_HPA
    # Find the smallest scale that gives an integer; six decimals are sufficient for any level.
    for scale in range(7):
        scaled_value = round(value * 10**scale)
        if math.isclose(scaled_value, value * 10**scale, rel_tol=1e-9, abs_tol=1e-9):
            break
    return FixedSurface(first_type, second_type, scale, scaled_value)


def build_half_level_coefficients(options: GribOptions) -> np.ndarray | None:
    """Return the coefficients of the half levels in GRIB2 order: all a in Pa, then all b, both from the top down.

    The result is None if the coefficients or the edges of the layers are unknown.
    """
    levels = options.model_levels
    if levels is None or levels.a_bounds is None or levels.b_bounds is None:
        return None
    a = np.append(levels.a_bounds[:, 0], levels.a_bounds[-1, 1])
    b = np.append(levels.b_bounds[:, 0], levels.b_bounds[-1, 1])
    return np.concatenate([a, b])
