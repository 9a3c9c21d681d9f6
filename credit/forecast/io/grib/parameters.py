"""GRIB2 parameters of forecast variables: code numbers, units and type of level.

The numbers are from code table 4.2 in WMO, Manual on Codes (WMO-No. 306), volume I.2, GRIB edition 2. No local tables
are used, so every decoder supports these parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from credit.config.sections.output import GribParameterConfig
from credit.data.formats.units import Conversion, find_conversion, normalise_units
from credit.errors import ConfigError, DataError, did_you_mean
from credit.physics.thermodynamics import GRAVITY

# Density of water in kg m-3, which converts a depth in m to a mass per area.
_WATER_DENSITY = 1000.0
# (units of a variable, units in GRIB) -> factor, for units of different quantities. UDUNITS converts units of the same
# quantity.
_PHYSICAL_FACTORS = {
    ("m2 s-2", "m"): 1.0 / GRAVITY,
    ("m", "m2 s-2"): GRAVITY,
    ("m", "kg m-2"): _WATER_DENSITY,
    ("mm", "kg m-2"): _WATER_DENSITY / 1000.0,
    ("m s-1", "kg m-2 s-1"): _WATER_DENSITY,
}


@dataclass(frozen=True)
class GribParameter:
    """GRIB2 parameter: code numbers, units and type of level of a physical quantity.

    Attributes:
        short_name: short name of ecCodes, for messages.
        numbers: discipline, category and number.
        units: units of an instantaneous value or a mean over time.
        sum_units: units of a sum over time; None if a sum over time is meaningless.
        level_type: type of level of a variable without levels, a key of `LEVEL_TYPES`; None for a variable on levels.
        level: value of the level, in hPa or m; None for a type without a value.
    """

    short_name: str
    numbers: tuple[int, int, int]
    units: str
    sum_units: str | None = None
    level_type: str | None = None
    level: float | None = None


# Name of a type of level in ecCodes -> (type of the first fixed surface, type of the second fixed surface, True if the
# first surface has a value); code table 4.5.
LEVEL_TYPES = {
    "surface": (1, 255, False),
    "nominalTop": (8, 255, False),
    "entireAtmosphere": (1, 8, False),
    "isobaricInhPa": (100, 255, True),
    "meanSea": (101, 255, False),
    "heightAboveSea": (102, 255, True),
    "heightAboveGround": (103, 255, True),
    "hybrid": (105, 255, True),
}
_2M = ("heightAboveGround", 2.0)
_10M = ("heightAboveGround", 10.0)
_100M = ("heightAboveGround", 100.0)
# Units of a rate or flux, and of its sum over time.
_WATER = ("kg m-2 s-1", "kg m-2")
_ENERGY = ("W m-2", "J m-2")
PARAMETERS = (
    # On pressure or model levels.
    GribParameter("z", (0, 3, 4), "m2 s-2"),
    GribParameter("gh", (0, 3, 5), "m"),
    GribParameter("t", (0, 0, 0), "K"),
    GribParameter("pt", (0, 0, 2), "K"),
    GribParameter("u", (0, 2, 2), "m s-1"),
    GribParameter("v", (0, 2, 3), "m s-1"),
    GribParameter("ws", (0, 2, 1), "m s-1"),
    GribParameter("w", (0, 2, 8), "Pa s-1"),
    GribParameter("wz", (0, 2, 9), "m s-1"),
    GribParameter("vo", (0, 2, 12), "s-1"),
    GribParameter("d", (0, 2, 13), "s-1"),
    GribParameter("pv", (0, 2, 14), "K m2 kg-1 s-1"),
    GribParameter("q", (0, 1, 0), "kg kg-1"),
    GribParameter("r", (0, 1, 1), "%"),
    GribParameter("clwc", (0, 1, 83), "kg kg-1"),
    GribParameter("ciwc", (0, 1, 84), "kg kg-1"),
    GribParameter("crwc", (0, 1, 85), "kg kg-1"),
    GribParameter("cswc", (0, 1, 86), "kg kg-1"),
    GribParameter("o3", (0, 14, 1), "kg kg-1"),
    # Near the surface.
    GribParameter("2t", (0, 0, 0), "K", None, *_2M),
    GribParameter("2d", (0, 0, 6), "K", None, *_2M),
    GribParameter("2sh", (0, 1, 0), "kg kg-1", None, *_2M),
    GribParameter("2r", (0, 1, 1), "%", None, *_2M),
    GribParameter("10u", (0, 2, 2), "m s-1", None, *_10M),
    GribParameter("10v", (0, 2, 3), "m s-1", None, *_10M),
    GribParameter("10si", (0, 2, 1), "m s-1", None, *_10M),
    GribParameter("100u", (0, 2, 2), "m s-1", None, *_100M),
    GribParameter("100v", (0, 2, 3), "m s-1", None, *_100M),
    # At the surface, and of the column.
    GribParameter("msl", (0, 3, 0), "Pa", None, "meanSea"),
    GribParameter("sp", (0, 3, 0), "Pa", None, "surface"),
    GribParameter("skt", (0, 0, 17), "K", None, "surface"),
    GribParameter("sst", (10, 3, 0), "K", None, "surface"),
    GribParameter("ci", (10, 2, 0), "1", None, "surface"),
    GribParameter("sd", (0, 1, 60), "kg m-2", None, "surface"),
    GribParameter("tcc", (0, 6, 1), "%", None, "entireAtmosphere"),
    GribParameter("tcwv", (0, 1, 64), "kg m-2", None, "entireAtmosphere"),
    # Rates, fluxes and their sums; fluxes are positive downwards.
    GribParameter("tp", (0, 1, 52), *_WATER, "surface"),
    GribParameter("cp", (0, 1, 37), *_WATER, "surface"),
    GribParameter("lsp", (0, 1, 54), *_WATER, "surface"),
    GribParameter("sf", (0, 1, 53), *_WATER, "surface"),
    GribParameter("ssrd", (0, 4, 7), *_ENERGY, "surface"),
    GribParameter("ssr", (0, 4, 9), *_ENERGY, "surface"),
    GribParameter("strd", (0, 5, 3), *_ENERGY, "surface"),
    GribParameter("str", (0, 5, 5), *_ENERGY, "surface"),
    GribParameter("tsr", (0, 4, 9), *_ENERGY, "nominalTop"),
    GribParameter("ttr", (0, 5, 5), *_ENERGY, "nominalTop"),
    GribParameter("slhf", (0, 0, 10), *_ENERGY, "surface"),
    GribParameter("sshf", (0, 0, 11), *_ENERGY, "surface"),
)
# Short name -> standard names and other names of the variable. For a variable without levels, a standard name is listed
# only if it also determines the level. For example, air_temperature does not determine the level.
_NAMES = {
    "z": "geopotential",
    "gh": "geopotential_height z3",
    "t": "air_temperature temperature",
    "pt": "air_potential_temperature potential_temperature",
    "u": "eastward_wind u_component_of_wind",
    "v": "northward_wind v_component_of_wind",
    "ws": "wind_speed",
    "w": "lagrangian_tendency_of_air_pressure vertical_velocity omega",
    "wz": "upward_air_velocity",
    "vo": "atmosphere_relative_vorticity vorticity",
    "d": "divergence_of_wind divergence",
    "pv": "ertel_potential_vorticity potential_vorticity",
    "q": "specific_humidity",
    "r": "relative_humidity",
    "clwc": "specific_cloud_liquid_water_content",
    "ciwc": "specific_cloud_ice_water_content",
    "crwc": "specific_rain_water_content",
    "cswc": "specific_snow_water_content",
    "o3": "mass_fraction_of_ozone_in_air ozone_mass_mixing_ratio",
    "2t": "t2m 2m_temperature tas trefht",
    "2d": "d2m 2m_dewpoint_temperature",
    "2sh": "q2m sh2 2m_specific_humidity huss",
    "2r": "r2 r2m 2m_relative_humidity hurs",
    "10u": "u10 u10m 10m_u_component_of_wind uas",
    "10v": "v10 v10m 10m_v_component_of_wind vas",
    "10si": "si10 wind10 10m_wind_speed sfcwind",
    "100u": "u100 u100m 100m_u_component_of_wind",
    "100v": "v100 v100m 100m_v_component_of_wind",
    "msl": "air_pressure_at_mean_sea_level air_pressure_at_sea_level mean_sea_level_pressure mslp psl",
    "sp": "surface_air_pressure surface_pressure ps",
    "skt": "surface_temperature skin_temperature ts",
    "sst": "sea_surface_temperature",
    "ci": "sea_ice_area_fraction sea_ice_cover siconc",
    "sd": "lwe_thickness_of_surface_snow_amount surface_snow_amount snow_depth",
    "tcc": "cloud_area_fraction total_cloud_cover",
    "tcwv": "atmosphere_mass_content_of_water_vapor total_column_water_vapour",
    "tp": "precipitation_amount lwe_thickness_of_precipitation_amount precipitation_flux total_precipitation "
    "total_precipitation_6hr total_precipitation_12hr total_precipitation_24hr pr",
    "cp": "convective_precipitation_amount lwe_thickness_of_convective_precipitation_amount convective_precipitation",
    "lsp": "stratiform_precipitation_amount lwe_thickness_of_stratiform_precipitation_amount large_scale_precipitation",
    "sf": "snowfall_amount lwe_thickness_of_snowfall_amount snowfall",
    "ssrd": "surface_downwelling_shortwave_flux_in_air surface_solar_radiation_downwards",
    "ssr": "surface_net_downward_shortwave_flux surface_net_solar_radiation",
    "strd": "surface_downwelling_longwave_flux_in_air surface_thermal_radiation_downwards",
    "str": "surface_net_downward_longwave_flux surface_net_thermal_radiation",
    "tsr": "toa_net_downward_shortwave_flux top_net_solar_radiation",
    "ttr": "toa_net_downward_longwave_flux top_net_thermal_radiation",
    "slhf": "surface_downward_latent_heat_flux surface_latent_heat_flux",
    "sshf": "surface_downward_sensible_heat_flux surface_sensible_heat_flux",
}
_BY_SHORT_NAME = {parameter.short_name: parameter for parameter in PARAMETERS}


def _build_name_index() -> dict[tuple[bool, str], GribParameter]:
    """Return a mapping for finding the GRIB2 parameter of a variable.

    A key is a pair: True for a variable on levels (otherwise False), and the name or standard name of the variable.
    """
    parameters = {}
    for parameter in PARAMETERS:
        has_levels = parameter.level_type is None
        for name in (parameter.short_name, *_NAMES[parameter.short_name].split()):
            parameters[has_levels, name] = parameter
    return parameters


_BY_NAME = _build_name_index()


def find_parameter(
    name: str, standard_name: str, has_levels: bool, configured: Mapping[str, GribParameterConfig]
) -> GribParameter:
    """Return the GRIB2 parameter of a variable.

    A parameter in the config takes precedence. Otherwise the variable's standard name or, if it has no parameter, the
    variable's name determines the parameter.

    Args:
        name: name of the variable.
        standard_name: CF standard name of the variable; empty if it has none.
        has_levels: True for a variable on pressure or model levels.
        configured: ``inference.grib.parameters``.

    Raises:
        ConfigError: if no parameter is known, or if the configured parameter does not fit the variable.
    """
    parameter: GribParameter | None
    if name in configured:
        parameter = _build_configured_parameter(name, configured[name])
    else:
        parameter = _BY_NAME.get((has_levels, standard_name)) or _BY_NAME.get((has_levels, name.lower()))
    key = f"inference.grib.parameters.{name}"
    if parameter is None:
        kind = "on levels" if has_levels else "without levels"
        raise ConfigError(
            f"inference.format: grib2: no GRIB2 parameter is known for {name} (standard_name "
            f'"{standard_name}"), a variable {kind}; set {key}, for example {{parameter: 2t}} or {{discipline: 0, '
            "category: 0, number: 0, units: K, level_type: heightAboveGround, level: 2}, or list only other variables "
            "in inference.variables"
        )
    if has_levels and parameter.level_type is not None:
        raise ConfigError(
            f"{key}: {parameter.short_name} is on one level ({parameter.level_type}), but {name} has levels; "
            "choose a parameter on levels"
        )
    if not has_levels and parameter.level_type is None:
        raise ConfigError(f"{key}: {name} has no levels; add level_type, one of {', '.join(LEVEL_TYPES)}")
    return parameter


def _build_configured_parameter(name: str, conf: GribParameterConfig) -> GribParameter:
    """Build the parameter of a variable from its entry in ``inference.grib.parameters``.

    Raises:
        ConfigError: if the entry names an unknown parameter or type of level, or if the level does not fit its type.
    """
    key = f"inference.grib.parameters.{name}"
    if conf.parameter is not None:
        if conf.parameter not in _BY_SHORT_NAME:
            raise ConfigError(
                f'{key}.parameter: "{conf.parameter}" is not among {", ".join(_BY_SHORT_NAME)}'
                f"{did_you_mean(conf.parameter, _BY_SHORT_NAME)}; give discipline, category, number and units"
            )
        listed = _BY_SHORT_NAME[conf.parameter]
        short_name, numbers, units, sum_units = (listed.short_name, listed.numbers, listed.units, listed.sum_units)
        level_type, level = (listed.level_type, listed.level)
    else:
        assert conf.discipline is not None and conf.category is not None and conf.number is not None
        assert conf.units is not None, "the config requires it"
        numbers = (conf.discipline, conf.category, conf.number)
        short_name = "parameter " + "-".join(str(number) for number in numbers)
        units, sum_units = (conf.units, conf.units)
        level_type, level = (None, None)
    if conf.level_type is not None:
        level_type, level = (conf.level_type, conf.level)
        if level_type not in LEVEL_TYPES:
            raise ConfigError(
                f'{key}.level_type: "{level_type}" is not among {", ".join(LEVEL_TYPES)}'
                f"{did_you_mean(level_type, LEVEL_TYPES)}"
            )
        if LEVEL_TYPES[level_type][2] != (level is not None):
            rule = "needs a level (in hPa or m)" if level is None else "has no value; remove level"
            raise ConfigError(f"{key}.level: the level type {level_type} {rule}")
    return GribParameter(short_name, numbers, units, sum_units, level_type, level)


def find_grib_conversion(name: str, units: str, target_units: str, parameter: GribParameter) -> Conversion:
    """Return the conversion of a variable to the units of its GRIB2 parameter.

    Args:
        name: name of the variable.
        units: units of the variable; empty if unknown.
        target_units: units of the values in GRIB2.
        parameter: parameter of the variable, for messages.

    Raises:
        ConfigError: if the units are unknown or cannot be converted.
    """
    key = f"inference.grib.parameters.{name}"
    target = normalise_units(target_units)
    if not units:
        raise ConfigError(
            f"inference.format: grib2: {name} has no units, but {parameter.short_name} is in {target}; set "
            f"data.variable_options.{name}.units, or write units into the data"
        )
    factor = _PHYSICAL_FACTORS.get((normalise_units(units), target))
    if factor is not None:
        return Conversion(factor, 0.0)
    try:
        return find_conversion(units, target, name, "the forecast", key) or Conversion(1.0, 0.0)
    except DataError as error:
        raise ConfigError(
            f"inference.format: grib2: {name} is in {units}, but the GRIB2 parameter {parameter.short_name} is in "
            f"{target}; correct the units, or data.variable_options.{name}.temporal (a sum over time and a rate have "
            f"different units), or set {key} to a different parameter"
        ) from error
