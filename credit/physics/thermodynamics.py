"""Formulas of the atmosphere on hybrid levels: humidity, hydrostatic geopotential, extrapolation below the surface.

All arrays are float64 in SI units. Arrays on levels have the shape (K, N...): K levels or layers, from the top down,
and one or more axes of cells. Arrays without levels have the shape (N...).

Sources: [IFS] ECMWF, IFS Documentation CY47R3 (2021), Part III (dynamics) and IV (physics). [TBB] K. E. Trenberth,
J. C. Berry and L. E. Buja, Vertical Interpolation and Truncation of Model-Coordinate Data, NCAR/TN-396+STR (1993).
ECMWF also uses the method of [TBB].
"""

from __future__ import annotations

import numpy as np

GRAVITY = 9.80665  # m s-2, the standard value
R_DRY = 287.0597  # J kg-1 K-1, [IFS] part IV, chapter 12
R_VAPOUR = 461.5250  # J kg-1 K-1, [IFS] part IV, chapter 12
# Heat capacity at constant pressure, J kg-1 K-1, of ideal gases with two and three atoms per molecule, as in [IFS].
CP_DRY = 3.5 * R_DRY
CP_VAPOUR = 4.0 * R_VAPOUR
LATENT_HEAT = 2.5008e6  # J kg-1, of vaporisation at 0 degC, [IFS]
# Ratio of the molar masses of water vapour and dry air.
_EPSILON = R_DRY / R_VAPOUR
_LAPSE_RATE = 0.0065  # K m-1, of the standard atmosphere
# Derivative of ln T by ln p at this lapse rate.
ALPHA = _LAPSE_RATE * R_DRY / GRAVITY
# K, [TBB]: surface temperatures outside of these limits are moved towards the limits, so that fields below the surface
# are smoother.
_WARMEST = 290.5
_COLDEST = 255.0
# m, [TBB]: between these two surface heights, the limit _WARMEST_PLATEAU (K) of the temperature at sea level gradually
# takes effect.
_LOW_PLATEAU = 2000.0
_HIGH_PLATEAU = 2500.0
_WARMEST_PLATEAU = 298.0
_FLAT = 1e-3  # m2 s-2; a smaller surface geopotential is treated as sea level
# K, [IFS] part IV, chapter 7: saturation is over water above _FREEZING and over ice below _ALL_ICE.
_FREEZING = 273.16
_ALL_ICE = 250.16


def virtual_temperature(temperature: np.ndarray, humidity: np.ndarray) -> np.ndarray:
    """Return virtual temperature (K), at which dry air has the same density as the humid air; [IFS] part III.

    Args:
        temperature: temperature (K), any shape.
        humidity: specific humidity (kg kg-1), the same shape.
    """
    return temperature * (1.0 + (R_VAPOUR / R_DRY - 1.0) * humidity)


def saturation_pressure_mixed(temperature: np.ndarray) -> np.ndarray:
    """Return saturation vapour pressure (Pa): over water above 0 degC, over ice below -23 degC, a mixture in between.

    The relative humidity of ERA5 refers to this pressure. Source: [IFS] part IV, chapter 7 (the formula of Tetens with
    the constants of Buck (1981) for water and of Alduchov and Eskridge (1996) for ice).

    Args:
        temperature: temperature (K), any shape.
    """
    water_share = np.clip((temperature - _ALL_ICE) / (_FREEZING - _ALL_ICE), 0.0, 1.0) ** 2
    over_water = _compute_tetens(temperature, 17.502, 32.19)
    over_ice = _compute_tetens(temperature, 22.587, -0.7)
    return water_share * over_water + (1.0 - water_share) * over_ice


def _compute_tetens(temperature: np.ndarray, factor: float, pole: float) -> np.ndarray:
    """Return saturation vapour pressure (Pa), computed with the formula of Tetens.

    Args:
        temperature: temperature (K), any shape.
        factor: factor in the exponent, a3 in [IFS].
        pole: temperature (K) at which the exponent is infinite, a4 in [IFS].
    """
    return 611.21 * np.exp(factor * (temperature - _FREEZING) / (temperature - pole))


def saturation_pressure_water(temperature: np.ndarray) -> np.ndarray:
    """Return saturation vapour pressure (Pa) over water, also below 0 degC.

    The relative humidity of weather stations refers to this pressure. Source: WMO, Guide to Instruments and Methods of
    Observation (WMO-No. 8), volume I, annex 4.B.

    Args:
        temperature: temperature (K), any shape.
    """
    celsius = temperature - 273.15
    return 611.2 * np.exp(17.62 * celsius / (243.12 + celsius))


def relative_humidity(humidity: np.ndarray, pressure: np.ndarray, saturation: np.ndarray) -> np.ndarray:
    """Return relative humidity (%), the ratio of vapour pressure to saturation vapour pressure.

    Args:
        humidity: specific humidity (kg kg-1), any shape.
        pressure: pressure (Pa), the same shape.
        saturation: saturation vapour pressure (Pa), the same shape.
    """
    # The vapour pressure is pressure * humidity / (epsilon + humidity * (1 - epsilon)).
    return 100.0 * pressure * humidity / (_EPSILON + humidity * (1.0 - _EPSILON)) / saturation


def geopotential(
    temperature_KN: np.ndarray, upper_KN: np.ndarray, lower_KN: np.ndarray, surface_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return geopotential (m2 s-2) at full levels and at the lower edges of layers, by hydrostatic integration upwards.

    The integration starts at the surface. From the lower to the upper edge of a layer, geopotential increases by
    R Tv ln(lower / upper). From the lower edge to the full level it increases by R Tv alpha, with
    alpha = 1 - upper / (lower - upper) ln(lower / upper), and alpha = ln 2 in a layer that reaches pressure 0. Here
    `lower` and `upper` are the pressures at the edges, R is the gas constant of dry air, and Tv is virtual temperature
    ([IFS] part III, equations 2.21 to 2.23).

    Args:
        temperature_KN: (K, N...) virtual temperature (K) of K layers, from the top down to the lowest layer.
        upper_KN: (K, N...) pressure (Pa) at the upper edges of the layers, 0 at the top of the atmosphere.
        lower_KN: (K, N...) pressure (Pa) at the lower edges; the last is surface pressure.
        surface_N: (N...) surface geopotential (m2 s-2).

    Returns:
        Geopotential (K, N...) at full levels, and geopotential (K, N...) at the lower edges.
    """
    at_top = upper_KN <= 0.0
    # At the top of the atmosphere the logarithm would be infinite. It is replaced by ln 2 and only enters the sum of
    # the uppermost layer, which no lower edge needs.
    log_ratio = np.log(lower_KN / np.where(at_top, 0.5 * lower_KN, upper_KN))
    thickness = R_DRY * temperature_KN * log_ratio
    # Add up the layers from the lowest layer upwards. Without the thickness of a layer itself, its sum is the
    # geopotential at its lower edge.
    lower_edge = surface_N + np.cumsum(thickness[::-1], axis=0)[::-1] - thickness
    alpha = np.where(at_top, np.log(2.0), 1.0 - upper_KN / (lower_KN - upper_KN) * log_ratio)
    return lower_edge + R_DRY * temperature_KN * alpha, lower_edge


def surface_temperature(lowest: np.ndarray, lowest_pressure: np.ndarray, surface_pressure: np.ndarray) -> np.ndarray:
    """Return surface temperature (K), extrapolated from the lowest level with the standard lapse rate, as in [TBB].

    Args:
        lowest: (N...) temperature of the lowest level (K).
        lowest_pressure: (N...) pressure of the lowest level (Pa).
        surface_pressure: (N...) surface pressure (Pa).
    """
    return lowest * (1.0 + ALPHA * (surface_pressure / lowest_pressure - 1.0))


def extrapolate_temperature(
    pressure: np.ndarray,
    surface_pressure: np.ndarray,
    lowest: np.ndarray,
    lowest_pressure: np.ndarray,
    surface_geopotential: np.ndarray,
) -> np.ndarray:
    """Return temperature (K) below the lowest level, as in [TBB].

    Between the lowest level and the surface, temperature is linear in pressure. Below the surface it is extrapolated
    with the lapse rate of the standard atmosphere, or with a smaller lapse rate if the surface is higher than 2000 m.

    Args:
        pressure: (N...) target pressure (Pa), not lower than `lowest_pressure`.
        surface_pressure: (N...) surface pressure (Pa).
        lowest: (N...) temperature of the lowest level (K).
        lowest_pressure: (N...) pressure of the lowest level (Pa).
        surface_geopotential: (N...) surface geopotential (m2 s-2).
    """
    # Interpolate between the lowest level and the surface.
    ground = surface_temperature(lowest, lowest_pressure, surface_pressure)
    depth_share = (pressure - lowest_pressure) / (surface_pressure - lowest_pressure)
    above_ground = lowest + depth_share * (ground - lowest)
    # Below the surface, compute the lapse rate from the temperature at sea level. Below plateaus, this temperature has
    # an upper limit, which gradually takes effect between two heights of the surface.
    height = surface_geopotential / GRAVITY
    sea_level = ground + _LAPSE_RATE * height
    limited_sea_level = np.minimum(sea_level, _WARMEST_PLATEAU)
    plateau_share = np.clip((height - _LOW_PLATEAU) / (_HIGH_PLATEAU - _LOW_PLATEAU), 0.0, 1.0)
    warming = np.maximum(sea_level + plateau_share * (limited_sea_level - sea_level) - ground, 0.0)
    # With y = ln(temperature / ground), the result is the expansion of ground * exp(y) to third order.
    y = _compute_dlnT_dlnp(warming, surface_geopotential) * np.log(pressure / surface_pressure)
    below_ground = ground * (1.0 + y + y**2 / 2.0 + y**3 / 6.0)
    return np.where(pressure <= surface_pressure, above_ground, below_ground)


def extrapolate_geopotential(
    pressure: np.ndarray,
    surface_pressure: np.ndarray,
    lowest_temperature: np.ndarray,
    lowest_pressure: np.ndarray,
    surface_geopotential: np.ndarray,
) -> np.ndarray:
    """Return geopotential (m2 s-2) at a pressure below the surface, as in [TBB].

    Args:
        pressure: (N...) target pressure (Pa), at least surface pressure.
        surface_pressure: (N...) surface pressure (Pa).
        lowest_temperature: (N...) temperature of the lowest level (K).
        lowest_pressure: (N...) pressure of the lowest level (Pa).
        surface_geopotential: (N...) surface geopotential (m2 s-2).
    """
    ground, alpha = _moderate_surface_temperature(
        lowest_temperature, lowest_pressure, surface_pressure, surface_geopotential
    )
    depth = np.log(pressure / surface_pressure)
    # The result contains the integral of R T over ln p from the surface, with T expanded in ln p to second order.
    y = alpha * depth
    return surface_geopotential - R_DRY * ground * depth * (1.0 + y / 2.0 + y**2 / 6.0)


def sea_level_pressure(
    surface_pressure: np.ndarray,
    lowest_temperature: np.ndarray,
    lowest_pressure: np.ndarray,
    surface_geopotential: np.ndarray,
) -> np.ndarray:
    """Return pressure (Pa) at mean sea level, as in [TBB].

    Args:
        surface_pressure: (N...) surface pressure (Pa).
        lowest_temperature: (N...) temperature of the lowest level (K).
        lowest_pressure: (N...) pressure of the lowest level (Pa).
        surface_geopotential: (N...) surface geopotential (m2 s-2).
    """
    ground, alpha = _moderate_surface_temperature(
        lowest_temperature, lowest_pressure, surface_pressure, surface_geopotential
    )
    # The result inverts the integral in `extrapolate_geopotential`. It is a series in the height of the surface divided
    # by the scale height of the air.
    relative_height = surface_geopotential / (R_DRY * ground)
    y = alpha * relative_height
    return surface_pressure * np.exp(relative_height * (1.0 - y / 2.0 + y**2 / 3.0))


def _moderate_surface_temperature(
    lowest: np.ndarray, lowest_pressure: np.ndarray, surface_pressure: np.ndarray, surface_geopotential: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return surface temperature (K) and d ln T / d ln p below the surface.

    A surface temperature outside of the limits of [TBB] is moved towards the nearer limit.
    See `extrapolate_temperature` for the arguments.
    """
    ground = surface_temperature(lowest, lowest_pressure, surface_pressure)
    # A temperature outside of the limits is replaced with the mean of the temperature and the limit.
    ground = np.where(ground < _COLDEST, 0.5 * (_COLDEST + ground), ground)
    sea_level = ground + _LAPSE_RATE * surface_geopotential / GRAVITY
    # If the surface is warmer than the limit, temperature is constant below the surface.
    is_hot = (ground > _WARMEST) & (sea_level > _WARMEST)
    alpha = _compute_dlnT_dlnp(np.minimum(sea_level, _WARMEST) - ground, surface_geopotential)
    return np.where(is_hot, 0.5 * (_WARMEST + ground), ground), np.where(is_hot, 0.0, alpha)


def _compute_dlnT_dlnp(warming: np.ndarray, surface_geopotential: np.ndarray) -> np.ndarray:
    """Return d ln T / d ln p for air that warms by `warming` (K) from the surface down to sea level.

    If the surface is at sea level, the result is the value of the standard atmosphere.

    Args:
        warming: (N...) difference of temperature (K) between sea level and the surface.
        surface_geopotential: (N...) surface geopotential (m2 s-2).
    """
    is_flat = np.abs(surface_geopotential) < _FLAT
    # At sea level the quotient would be 0 / 0. A divisor of 1 avoids this; the quotient is not used there.
    divisor = np.where(is_flat, 1.0, surface_geopotential)
    return np.where(is_flat, ALPHA, R_DRY * warming / divisor)
