"""Names of meteorological variables in WeatherBench and in earth2studio."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VariableNames:
    """Names of a meteorological variable in this package, in WeatherBench and in earth2studio.

    Attributes:
        config_names: names in configs of this package: the names of ECMWF and common variants.
        weatherbench: long name in WeatherBench 2 and ARCO-ERA5. ``{hours}`` is a placeholder for the accumulation
            period in hours.
        earth2studio: name in earth2studio, without the level.
        units: units in earth2studio.
        has_levels: True if the variable is on levels.
    """

    config_names: tuple[str, ...]
    weatherbench: str
    earth2studio: str
    units: str
    has_levels: bool = False


# Sources: the public stores of WeatherBench 2, and ``earth2studio.lexicon`` 0.19.
VARIABLES = (
    VariableNames(("z",), "geopotential", "z", "m2 s-2", has_levels=True),
    VariableNames(("t",), "temperature", "t", "K", has_levels=True),
    VariableNames(("u",), "u_component_of_wind", "u", "m s-1", has_levels=True),
    VariableNames(("v",), "v_component_of_wind", "v", "m s-1", has_levels=True),
    VariableNames(("w",), "vertical_velocity", "w", "Pa s-1", has_levels=True),
    VariableNames(("q",), "specific_humidity", "q", "kg kg-1", has_levels=True),
    VariableNames(("r",), "relative_humidity", "r", "%", has_levels=True),
    VariableNames(("t2m", "2t"), "2m_temperature", "t2m", "K"),
    VariableNames(("d2m", "2d"), "2m_dewpoint_temperature", "d2m", "K"),
    VariableNames(("u10", "10u", "u10m"), "10m_u_component_of_wind", "u10m", "m s-1"),
    VariableNames(("v10", "10v", "v10m"), "10m_v_component_of_wind", "v10m", "m s-1"),
    VariableNames(("u100", "100u", "u100m"), "100m_u_component_of_wind", "u100m", "m s-1"),
    VariableNames(("v100", "100v", "v100m"), "100m_v_component_of_wind", "v100m", "m s-1"),
    VariableNames(("msl", "mslp"), "mean_sea_level_pressure", "msl", "Pa"),
    VariableNames(("sp",), "surface_pressure", "sp", "Pa"),
    VariableNames(("sst",), "sea_surface_temperature", "sst", "K"),
    VariableNames(("tcwv",), "total_column_water_vapour", "tcwv", "kg m-2"),
    VariableNames(("tp",), "total_precipitation_{hours}hr", "tp{hours:02d}", "m"),
)


def find_variable_names(variable: str, has_levels: bool) -> VariableNames | None:
    """Return the names of a variable; None if it is not in `VARIABLES`.

    Args:
        variable: a short name, or the long name of WeatherBench.
        has_levels: True if the variable is on levels. A name on levels does not match an entry without levels.
    """
    for names in VARIABLES:
        if names.has_levels == has_levels and variable in (*names.config_names, names.weatherbench):
            return names
    return None


def weatherbench_name(variable: str, has_levels: bool, hours: int | None = None) -> str:
    """Return the name of a variable in WeatherBench; a variable without an entry in `VARIABLES` keeps its name.

    Args:
        variable: name in the config.
        has_levels: True if the variable is on levels.
        hours: accumulation period in hours; None if it is unknown, or if the variable is not accumulated.
    """
    names = find_variable_names(variable, has_levels)
    if names is None or (hours is None and "{hours}" in names.weatherbench):
        return variable
    return names.weatherbench.format(hours=hours)
