"""Formulas of the atmosphere on hybrid levels: humidity, hydrostatic geopotential, extrapolation below the ground.

All arrays are float64 in SI units. Their first axis is the level, from the top down; the other axes are cells.

Sources: [IFS] ECMWF, IFS Documentation CY47R3 (2021), Part III (dynamics) and IV (physics). [TBB] K. E. Trenberth,
J. C. Berry and L. E. Buja, Vertical Interpolation and Truncation of Model-Coordinate Data, NCAR/TN-396+STR (1993),
the method that ECMWF uses as well.
"""

from __future__ import annotations

import numpy as np

GRAVITY = 9.80665  # m s-2
R_DRY = 287.0597  # J kg-1 K-1, [IFS] part IV, chapter 12
R_VAPOUR = 461.5250  # J kg-1 K-1, likewise
# Heat capacity at constant pressure, J kg-1 K-1, of ideal gases of two and of three atoms a molecule, as in [IFS].
CP_DRY = 3.5 * R_DRY
CP_VAPOUR = 4.0 * R_VAPOUR
LATENT_HEAT = 2.5008e6  # J kg-1, of vaporisation at 0 degC, [IFS]
# Ratio of the molar masses of water vapour and dry air.
_EPSILON = R_DRY / R_VAPOUR
_LAPSE_RATE = 0.0065  # K m-1, of the standard atmosphere
# Derivative of ln T by ln p at this lapse rate.
ALPHA = _LAPSE_RATE * R_DRY / GRAVITY
# K, [TBB]: temperatures below the ground that are warmer or colder are moderated, which gives a smoother pressure.
_WARMEST = 290.5
_COLDEST = 255.0
# m, [TBB]: between these heights of the ground the limit _WARMEST_PLATEAU (K) of the temperature at sea level sets in.
_LOW_PLATEAU = 2000.0
_HIGH_PLATEAU = 2500.0
_WARMEST_PLATEAU = 298.0
_FLAT = 1e-3  # m2 s-2; a surface geopotential below it is sea level
# K, [IFS] part IV, chapter 7: saturation is over water above the first, over ice below the second temperature.
_FREEZING = 273.16
_ALL_ICE = 250.16


def virtual_temperature(temperature: np.ndarray, humidity: np.ndarray) -> np.ndarray:
    """Return virtual temperature (K), at which dry air has the density of the humid air; [IFS] part III.

    Args:
        temperature: temperature (K), any shape.
        humidity: specific humidity (kg kg-1), the same shape.
    """
    return temperature * (1.0 + (R_VAPOUR / R_DRY - 1.0) * humidity)


def saturation_pressure_mixed(temperature: np.ndarray) -> np.ndarray:
    """Return saturation vapour pressure (Pa): over water above 0 degC, over ice below -23 degC, mixed between.

    [IFS] part IV, chapter 7 (Tetens' formula; the constants of Buck (1981) for water, of Alduchov and
    Eskridge (1996) for ice). ERA5's relative humidity is with respect to this.

    Args:
        temperature: temperature (K), any shape.
    """
    water_share = np.clip((temperature - _ALL_ICE) / (_FREEZING - _ALL_ICE), 0.0, 1.0) ** 2
    over_water = _compute_tetens(temperature, 17.502, 32.19)
    over_ice = _compute_tetens(temperature, 22.587, -0.7)
    return water_share * over_water + (1.0 - water_share) * over_ice


def _compute_tetens(temperature: np.ndarray, factor: float, pole: float) -> np.ndarray:
    """Return saturation vapour pressure (Pa) by Tetens' formula.

    Args:
        temperature: temperature (K), any shape.
        factor: factor of the exponent, a3 of [IFS].
        pole: temperature at which the exponent is infinite (K), a4 of [IFS].
    """
    return 611.21 * np.exp(factor * (temperature - _FREEZING) / (temperature - pole))


def saturation_pressure_water(temperature: np.ndarray) -> np.ndarray:
    """Return saturation vapour pressure over water (Pa) at any temperature (K), as weather stations report.

    WMO, Guide to Instruments and Methods of Observation (WMO-No. 8), volume I, annex 4.B. Any shape.
    """
    celsius = temperature - 273.15
    return 611.2 * np.exp(17.62 * celsius / (243.12 + celsius))


def relative_humidity(humidity: np.ndarray, pressure: np.ndarray, saturation: np.ndarray) -> np.ndarray:
    """Return relative humidity (%), the vapour pressure over that at saturation.

    Args:
        humidity: specific humidity (kg kg-1), any shape.
        pressure: pressure (Pa).
        saturation: saturation vapour pressure (Pa).
    """
    return 100.0 * pressure * humidity / (_EPSILON + humidity * (1.0 - _EPSILON)) / saturation


def geopotential(
    temperature_KN: np.ndarray, upper_KN: np.ndarray, lower_KN: np.ndarray, surface_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return geopotential (m2 s-2) at full levels and at the layers' lower edges, by integration from the ground up.

    [IFS] part III, equations 2.21 to 2.23: from half level to half level R Tv ln(lower / upper), from the half level
    below to the full level R Tv alpha, alpha = 1 - upper / (lower - upper) ln(lower / upper), at the top ln 2.

    Args:
        temperature_KN: virtual temperature (K) of K layers, the lowest of the model last.
        upper_KN: pressure at the upper edges of the layers (Pa), 0 at the top of the atmosphere.
        lower_KN: pressure at the lower edges (Pa); the last is surface pressure.
        surface_N: geopotential of the ground (m2 s-2).

    Returns:
        (K, N...) geopotential at full levels, and (K, N...) at the lower edges.
    """
    at_top = upper_KN <= 0.0
    # At the top the logarithm is infinite. It is replaced by ln 2, which is alpha there.
    ratio = np.log(lower_KN / np.where(at_top, 0.5 * lower_KN, upper_KN))
    thickness = R_DRY * temperature_KN * ratio
    below = surface_N + np.cumsum(thickness[::-1], axis=0)[::-1] - thickness
    alpha = np.where(at_top, np.log(2.0), 1.0 - upper_KN / (lower_KN - upper_KN) * ratio)
    return below + R_DRY * temperature_KN * alpha, below


def surface_temperature(lowest: np.ndarray, lowest_pressure: np.ndarray, surface_pressure: np.ndarray) -> np.ndarray:
    """Return temperature at the ground (K) by the standard lapse rate from the lowest level, after [TBB].

    Args:
        lowest: temperature of the lowest level (K).
        lowest_pressure: pressure of the lowest level (Pa).
        surface_pressure: pressure at the ground (Pa).
    """
    return lowest * (1.0 + ALPHA * (surface_pressure / lowest_pressure - 1.0))


def extrapolate_temperature(
    pressure: np.ndarray,
    surface_pressure: np.ndarray,
    lowest: np.ndarray,
    lowest_pressure: np.ndarray,
    surface_geopotential: np.ndarray,
) -> np.ndarray:
    """Return temperature (K) below the lowest level: linear in pressure down to the ground, extrapolated below it.

    [TBB]: below the ground temperature follows the lapse rate of the standard atmosphere if the ground is low, and a
    smaller one if it is high.

    Args:
        pressure: pressure of the target (Pa), at least that of the lowest level.
        surface_pressure: pressure at the ground (Pa).
        lowest: temperature of the lowest level (K).
        lowest_pressure: pressure of the lowest level (Pa).
        surface_geopotential: geopotential of the ground (m2 s-2).
    """
    # Between the lowest level and the ground.
    ground = surface_temperature(lowest, lowest_pressure, surface_pressure)
    share = (pressure - lowest_pressure) / (surface_pressure - lowest_pressure)
    above = lowest + share * (ground - lowest)
    # Below the ground, whose lapse rate follows from a temperature at sea level that is limited under plateaus.
    height = surface_geopotential / GRAVITY
    sea_level = ground + _LAPSE_RATE * height
    plateau = np.minimum(sea_level, _WARMEST_PLATEAU)
    plateau_share = np.clip((height - _LOW_PLATEAU) / (_HIGH_PLATEAU - _LOW_PLATEAU), 0.0, 1.0)
    warming = np.maximum(sea_level + plateau_share * (plateau - sea_level) - ground, 0.0)
    # The third-order expansion of ground * exp(y).
    y = _compute_alpha(warming, surface_geopotential) * np.log(pressure / surface_pressure)
    return np.where(pressure <= surface_pressure, above, ground * (1.0 + y + y**2 / 2.0 + y**3 / 6.0))


def extrapolate_geopotential(
    pressure: np.ndarray,
    surface_pressure: np.ndarray,
    lowest_temperature: np.ndarray,
    lowest_pressure: np.ndarray,
    surface_geopotential: np.ndarray,
) -> np.ndarray:
    """Return geopotential (m2 s-2) below the ground, after [TBB]; arguments as of `extrapolate_temperature`."""
    ground, alpha = _moderate_ground(lowest_temperature, lowest_pressure, surface_pressure, surface_geopotential)
    depth = np.log(pressure / surface_pressure)
    # The integral of R T over ln p from the ground, with the expansion of T in ln p to second order.
    y = alpha * depth
    return surface_geopotential - R_DRY * ground * depth * (1.0 + y / 2.0 + y**2 / 6.0)


def sea_level_pressure(
    surface_pressure: np.ndarray,
    lowest_temperature: np.ndarray,
    lowest_pressure: np.ndarray,
    surface_geopotential: np.ndarray,
) -> np.ndarray:
    """Return pressure at mean sea level (Pa), after [TBB]; arguments as of `extrapolate_temperature`."""
    ground, alpha = _moderate_ground(lowest_temperature, lowest_pressure, surface_pressure, surface_geopotential)
    # The inverse of the integral in `extrapolate_geopotential`, as a series.
    x = surface_geopotential / (R_DRY * ground)
    y = alpha * x
    return surface_pressure * np.exp(x * (1.0 - y / 2.0 + y**2 / 3.0))


def _moderate_ground(
    lowest: np.ndarray, lowest_pressure: np.ndarray, surface_pressure: np.ndarray, surface_geopotential: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return temperature at the ground (K) and d ln T / d ln p below it, neither very warm nor very cold.

    [TBB]; arguments as of `extrapolate_temperature`.
    """
    ground = surface_temperature(lowest, lowest_pressure, surface_pressure)
    ground = np.where(ground < _COLDEST, 0.5 * (_COLDEST + ground), ground)
    sea_level = ground + _LAPSE_RATE * surface_geopotential / GRAVITY
    is_hot = (ground > _WARMEST) & (sea_level > _WARMEST)
    alpha = _compute_alpha(np.minimum(sea_level, _WARMEST) - ground, surface_geopotential)
    return np.where(is_hot, 0.5 * (_WARMEST + ground), ground), np.where(is_hot, 0.0, alpha)


def _compute_alpha(warming: np.ndarray, surface_geopotential: np.ndarray) -> np.ndarray:
    """Return d ln T / d ln p with which air warms by `warming` (K) from the ground down to sea level.

    On flat ground it is that of the standard atmosphere.
    """
    is_flat = np.abs(surface_geopotential) < _FLAT
    # At sea level the quotient is 0 / 0, so it is computed with another divisor and not used.
    return np.where(is_flat, ALPHA, R_DRY * warming / np.where(is_flat, 1.0, surface_geopotential))
