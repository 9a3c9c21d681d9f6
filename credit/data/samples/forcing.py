"""Forcing that is computed from time and location: solar radiation, and encodings of time and location.

The solar radiation is the incoming radiation at the top of the atmosphere. The position of the Sun is computed with the
low-precision formula of the Astronomical Almanac (accurate to about an arc minute for two centuries around 2000). Over
a time step, the flux is integrated analytically between the hour angles of sunrise and sunset. Therefore the accuracy
does not depend on the length of the step, and the radiation in polar night is exactly 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from credit.calendar import Calendar

if TYPE_CHECKING:
    from credit.config.sections.data import SolarConfig
    from credit.grid import LatLonGrid

SOLAR_CONSTANT = 1361.0  # W m-2, Kopp and Lean (2011), doi:10.1029/2010GL045777

# Total solar irradiance at 1 au, yearly means 1940-2008, W m-2: the series recommended for CMIP5 (SOLARIS; Lean 2000
# with a varying background). ERA5 uses this series times 0.9965, and repeats its last cycle (1996-2008) after 2008.
_CMIP5_FIRST_YEAR = 1940
_CMIP5_LAST_YEAR = 2008
_CYCLE_YEARS = 13
_ERA5_SCALE = 0.9965
_CMIP5_TSI = (
    *(1365.9242, 1365.8451, 1365.7419, 1365.5841, 1365.6140, 1365.8810, 1365.9791, 1366.2185, 1366.3490, 1366.2555),
    *(1366.0131, 1365.7765, 1365.7676, 1365.6284, 1365.6564, 1365.7773, 1366.3109, 1366.6681, 1366.6328, 1366.3828),
    *(1366.2767, 1365.9199, 1365.7484, 1365.6963, 1365.6976, 1365.7341, 1365.9178, 1366.1143, 1366.1644, 1366.2476),
    *(1366.2426, 1365.9580, 1366.0525, 1365.7991, 1365.7271, 1365.5345, 1365.6453, 1365.8331, 1366.2747, 1366.6348),
    *(1366.6482, 1366.6951, 1366.2859, 1366.1992, 1365.8103, 1365.6416, 1365.6379, 1365.7899, 1366.0826, 1366.6479),
    *(1366.5533, 1366.4457, 1366.3021, 1366.0286, 1365.7971, 1365.6996, 1365.6121, 1365.7399, 1366.1021, 1366.3851),
    *(1366.6836, 1366.6022, 1366.6807, 1366.2300, 1366.0480, 1365.8545, 1365.8107, 1365.7240, 1365.6918),
)

_DAYS_1900_TO_J2000 = 36524.5  # from 1900-01-01 00:00 to 2000-01-01 12:00
# Days from J2000 to 2001-01-01. In calendars without leap days, the Earth's orbit at the start of a year is as on this
# day.
_JAN_2001_SINCE_J2000 = 365.5
_TROPICAL_YEAR_DAYS = 365.2422
_SECONDS_PER_RADIAN = 86400.0 / (2.0 * np.pi)
# The declination of the Sun is treated as constant over this interval; it changes by at most 0.05 degrees.
_MAX_INTERVAL_MINUTES = 180

# Rounded mean and standard deviation of the flux over all cells of a latitude-longitude grid and a year, in W m-2. The
# values for ``step`` were computed with time steps of 6 h.
_FLUX_STATISTICS = {"step": (297.0, 356.0), "daily": (297.0, 168.0)}


def toa_radiation(
    lat_deg: np.ndarray,
    lon_deg: np.ndarray,
    minutes: int,
    calendar: Calendar,
    step_minutes: int,
    window: str = "past",
    tsi: str = "constant",
    mean: str = "step",
) -> np.ndarray:
    """Return the solar radiation that reaches the top of the atmosphere over one step.

    Args:
        lat_deg: (H,) degrees north.
        lon_deg: (W,) degrees east.
        minutes: valid time t of the input frame (the start of the time step), in minutes since 1900 UTC.
        calendar: calendar of `minutes`. In the standard calendar, the position of the Sun depends on date and year. In
            other calendars, it depends on the fraction of the year.
        step_minutes: length dt of the time step in minutes.
        window: ``past`` integrates over (t - dt, t], the interval of an ERA5 accumulation with the label t; ``next``
            integrates over (t, t + dt].
        tsi: total solar irradiance: ``constant`` (1361 W m-2), or ``era5`` (yearly values of ERA5, interpolated
            linearly between the middles of the years; see `era5_irradiance`).
        mean: ``step`` integrates the flux over the window. ``daily`` uses the mean flux of the day that contains the
            middle of the window, times dt.

    Returns:
        (H, W) float32, in J m-2.
    """
    assert window in ("past", "next")
    assert mean in ("step", "daily")
    assert tsi in ("constant", "era5")
    start = float(minutes)
    if window == "past":
        start = float(minutes - step_minutes)
    lat = np.deg2rad(np.asarray(lat_deg, dtype=np.float64))[:, None]
    lon = np.deg2rad(np.asarray(lon_deg, dtype=np.float64))[None, :]
    if mean == "daily":
        # The daily mean does not depend on longitude.
        mean_cosine = _compute_daily_mean(lat, start + step_minutes / 2.0, calendar)
        total = np.repeat(mean_cosine * step_minutes * 60.0, lon.shape[1], axis=1)
    else:
        # The Sun moves little within an interval, so its position in the middle is used for the complete interval.
        num_intervals = max(1, int(np.ceil(step_minutes / _MAX_INTERVAL_MINUTES)))
        edges = start + np.linspace(0.0, step_minutes, num_intervals + 1)
        total = np.zeros((lat.shape[0], lon.shape[1]))
        for interval_start, interval_end in zip(edges[:-1], edges[1:], strict=True):
            total += _integrate_interval(lat, lon, interval_start, interval_end, calendar)
    irradiance = SOLAR_CONSTANT
    if tsi == "era5":
        irradiance = era5_irradiance(start + step_minutes / 2.0, calendar)
    return (irradiance * total).astype(np.float32)


def era5_irradiance(minutes: float, calendar: Calendar) -> float:
    """Return the total solar irradiance of ERA5 in W m-2 at 1 au (the CMIP5 series times 0.9965).

    Args:
        minutes: time in minutes since 1900 to which the yearly means are interpolated.
        calendar: calendar of `minutes`.
    """
    calendar_year = calendar.datetime(int(minutes)).year
    year_fraction = float(calendar.year_fraction(np.array(int(minutes))))
    # Yearly means are valid in the middle of the year, so an integer here means the middle of a year.
    year = calendar_year + year_fraction - 0.5
    earlier_year = int(np.floor(year))
    later_weight = year - earlier_year
    earlier = _find_cmip5_irradiance(earlier_year)
    later = _find_cmip5_irradiance(earlier_year + 1)
    return _ERA5_SCALE * ((1.0 - later_weight) * earlier + later_weight * later)


def _find_cmip5_irradiance(year: int) -> float:
    """Return the mean total solar irradiance of a year in the CMIP5 series, in W m-2.

    After the end of the series, its last solar cycle is repeated. Before its beginning, the first value is used.
    """
    if year > _CMIP5_LAST_YEAR:
        first_cycle_year = _CMIP5_LAST_YEAR - _CYCLE_YEARS + 1
        years_after_series = year - _CMIP5_LAST_YEAR - 1
        year = first_cycle_year + years_after_series % _CYCLE_YEARS
    year = max(year, _CMIP5_FIRST_YEAR)
    return _CMIP5_TSI[year - _CMIP5_FIRST_YEAR]


def sun_position(minutes: float, calendar: Calendar) -> tuple[float, float, float]:
    """Return the declination (rad), the equation of time (rad of hour angle) and the inverse squared distance (au-2).

    Source: "Approximate Solar Coordinates", The Astronomical Almanac, section C (also aa.usno.navy.mil/faq/sun_approx).

    Args:
        minutes: the time in minutes since 1900 UTC.
        calendar: calendar of `minutes`.
    """
    # The angles of the formula are linear in the number of days since J2000.
    if calendar.name in ("standard", "proleptic_gregorian"):
        days = minutes / 1440.0 - _DAYS_1900_TO_J2000
    else:
        whole_minutes = np.array(int(np.floor(minutes)))
        days = _JAN_2001_SINCE_J2000 + _TROPICAL_YEAR_DAYS * float(calendar.year_fraction(whole_minutes))
    mean_anomaly = np.deg2rad(357.529 + 0.98560028 * days)
    mean_longitude = np.deg2rad(280.459 + 0.98564736 * days)
    equation_of_center = np.deg2rad(1.915 * np.sin(mean_anomaly) + 0.020 * np.sin(2.0 * mean_anomaly))
    ecliptic_longitude = mean_longitude + equation_of_center
    distance = 1.00014 - 0.01671 * np.cos(mean_anomaly) - 0.00014 * np.cos(2.0 * mean_anomaly)
    obliquity = np.deg2rad(23.439 - 0.00000036 * days)
    declination = np.arcsin(np.sin(obliquity) * np.sin(ecliptic_longitude))
    right_ascension = np.arctan2(np.cos(obliquity) * np.sin(ecliptic_longitude), np.cos(ecliptic_longitude))
    # The equation of time is a small angle, so full turns are removed from the difference.
    equation_of_time = np.mod(mean_longitude - right_ascension + np.pi, 2.0 * np.pi) - np.pi
    return float(declination), float(equation_of_time), float(distance**-2)


def _compute_daylight(lat: np.ndarray, declination: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the hour angle of sunset, and the two coefficients that determine the solar zenith angle.

    The cosine of the zenith angle is sine_product + cosine_product * cos(hour angle).

    Args:
        lat: (H, 1) latitude in radians.
        declination: declination of the Sun in radians.

    Returns:
        (H, 1) each: sine_product, cosine_product, and the hour angle of sunset in radians (0 in polar night, pi in
        polar day).
    """
    sine_product = np.sin(lat) * np.sin(declination)
    cosine_product = np.cos(lat) * np.cos(declination)
    # At sunset, the cosine of the zenith angle is 0. Clipping treats polar night and polar day. The lower bound avoids
    # a division by 0 at the poles.
    cosine_of_sunset = np.clip(-sine_product / np.maximum(cosine_product, 1e-15), -1.0, 1.0)
    return sine_product, cosine_product, np.arccos(cosine_of_sunset)


def _compute_daily_mean(lat: np.ndarray, minutes: float, calendar: Calendar) -> np.ndarray:
    """Return the daily mean of max(cos(zenith angle), 0), divided by the squared distance of the Sun.

    Args:
        lat: (H, 1) latitude in radians.
        minutes: time in minutes since 1900; the position of the Sun at this time is used for the complete day.
        calendar: calendar of `minutes`.

    Returns:
        (H, 1) in au-2.
    """
    declination, _, inverse_square = sun_position(minutes, calendar)
    sine_product, cosine_product, sunset = _compute_daylight(lat, declination)
    # Integral of the cosine from noon to sunset.
    half_day = sine_product * sunset + cosine_product * np.sin(sunset)
    return inverse_square / np.pi * np.maximum(half_day, 0.0)


def _integrate_interval(lat: np.ndarray, lon: np.ndarray, start: float, end: float, calendar: Calendar) -> np.ndarray:
    """Return the time integral of max(cos(zenith angle), 0), divided by the squared distance of the Sun.

    Args:
        lat: (H, 1) latitude in radians.
        lon: (1, W) longitude in radians.
        start: start of the interval in minutes since 1900.
        end: end of the interval in minutes since 1900.
        calendar: calendar of `start` and `end`.

    Returns:
        (H, W) in s au-2.
    """
    declination, equation_of_time, inverse_square = sun_position(0.5 * (start + end), calendar)
    sine_product, cosine_product, sunset = _compute_daylight(lat, declination)
    # Integral of the cosine from noon to sunset.
    half_day = sine_product * sunset + cosine_product * np.sin(sunset)

    def integrate_from_noon(minutes: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of days since an arbitrary noon, (1, W), and the integral since the last noon, (H, W).

        Days and noon refer to local solar time; a day is one turn of the hour angle.
        """
        # Subtract whole days, so that the angle stays small and accurate.
        day = (minutes - 1440.0 * np.floor(start / 1440.0)) / 1440.0
        hour_angle = 2.0 * np.pi * (day - 0.5) + equation_of_time + lon
        turns = np.floor((hour_angle + np.pi) / (2.0 * np.pi))
        # The integrand is 0 between sunset and sunrise, so clip the angle.
        angle = np.clip(hour_angle - 2.0 * np.pi * turns, -sunset, sunset)
        return turns, sine_product * angle + cosine_product * np.sin(angle)

    start_turns, start_integral = integrate_from_noon(start)
    end_turns, end_integral = integrate_from_noon(end)
    # With this order of summation, the result for a night is exactly 0: 2x + (-x - x).
    integral = 2.0 * half_day * (end_turns - start_turns) + (end_integral - start_integral)
    return inverse_square * _SECONDS_PER_RADIAN * np.maximum(integral, 0.0)


def compute_dynamic_forcing(
    name: str, minutes: int, calendar: Calendar, grid: LatLonGrid, step_minutes: int, solar: SolarConfig
) -> np.ndarray:
    """Compute a dynamic forcing for a time step, (H, W) float32.

    Args:
        name: name of the forcing, from `credit.channels.COMPUTED_DYNAMIC`. ``sin_year`` and ``cos_year`` depend on the
            fraction of the calendar year. ``sin_day`` and ``cos_day`` depend on local mean solar
            time (UTC plus one hour for each 15 degrees east). ``toa_incident_solar_radiation`` is in J m-2, see
            `toa_radiation`.
        minutes: start of the time step in minutes since 1900 UTC.
        calendar: calendar of `minutes`.
        grid: grid of the field, H rows and W columns.
        step_minutes: length of the time step in minutes.
        solar: settings of the solar radiation, see `toa_radiation`.
    """
    if name == "toa_incident_solar_radiation":
        return toa_radiation(grid.lat, grid.lon, minutes, calendar, step_minutes, solar.window, solar.tsi, solar.mean)
    # All other names begin with sin or cos.
    wave = {"sin": np.sin, "cos": np.cos}[name[:3]]
    if name.endswith("_year"):
        value = wave(2.0 * np.pi * calendar.year_fraction(np.array(minutes)))
        return np.full(grid.shape, value, dtype=np.float32)
    assert name.endswith("_day"), name
    local_time = calendar.day_fraction(np.array(minutes)) + grid.lon / 360.0
    wave_W = wave(2.0 * np.pi * local_time).astype(np.float32)
    return np.broadcast_to(wave_W, grid.shape).copy()


def compute_static(name: str, grid: LatLonGrid) -> np.ndarray:
    """Compute the static input ``sin_latitude``, ``sin_longitude`` or ``cos_longitude``, (H, W) float32."""
    function_name, coordinate = name.split("_")
    wave = {"sin": np.sin, "cos": np.cos}[function_name]
    degrees = {"latitude": grid.lat[:, None], "longitude": grid.lon[None, :]}[coordinate]
    encoding = wave(np.deg2rad(degrees)).astype(np.float32)
    return np.broadcast_to(encoding, grid.shape).copy()


def get_fixed_statistics(name: str, step_minutes: int, solar: SolarConfig) -> tuple[float, float]:
    """Return the mean and the standard deviation with which a computed channel is normalised.

    The statistics do not depend on the data. Encodings of time and location are of order 1, so their mean is set to 0
    and their standard deviation to 1. For solar radiation, the result is the statistics of the flux over a year and a
    latitude-longitude grid, times the length of the time step in seconds, in J m-2.

    Args:
        name: name of a computed channel.
        step_minutes: length of the time step in minutes.
        solar: settings of the solar radiation; ``mean`` selects the flux of each step or its daily mean.
    """
    if name != "toa_incident_solar_radiation":
        return 0.0, 1.0
    mean, std = _FLUX_STATISTICS[solar.mean]
    return mean * step_minutes * 60.0, std * step_minutes * 60.0
