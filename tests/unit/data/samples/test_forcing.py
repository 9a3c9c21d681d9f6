"""Tests of computed forcing against pvlib, closed forms and the definitions of the encodings."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest

from credit.calendar import Calendar
from credit.channels import COMPUTED_DYNAMIC, COMPUTED_STATIC
from credit.config.sections.data import SolarConfig
from credit.data.samples.forcing import (
    SOLAR_CONSTANT,
    compute_dynamic_forcing,
    compute_static,
    era5_irradiance,
    get_fixed_statistics,
    sun_position,
    toa_radiation,
)
from credit.grid import LatLonGrid

CALENDAR = Calendar()
LAT = np.array([90.0, 78.0, 66.0, 45.0, 20.0, 0.0, -33.0, -67.0, -90.0])
LON = np.arange(0.0, 360.0, 45.0)


def _build_grid(rows: int = 19, columns: int = 36) -> LatLonGrid:
    return LatLonGrid.from_coords(np.linspace(90, -90, rows), np.arange(columns) * 360.0 / columns)[0]


def _integrate_with_pvlib(start: pd.Timestamp, hours: int) -> np.ndarray:
    """Return J m-2 by the midpoint rule over minutes, with pvlib's NREL solar position and distance."""
    pvlib = pytest.importorskip("pvlib")
    times = pd.date_range(start, periods=hours * 60, freq="1min", tz="UTC") + pd.Timedelta("30s")
    normal = pvlib.irradiance.get_extra_radiation(times, solar_constant=SOLAR_CONSTANT, method="nrel").to_numpy()
    result = np.empty((len(LAT), len(LON)))
    for i, lat in enumerate(LAT):
        for j, lon in enumerate(LON):
            zenith = pvlib.solarposition.get_solarposition(times, lat, lon, method="nrel_numpy")["zenith"].to_numpy()
            result[i, j] = (normal * np.maximum(np.cos(np.deg2rad(zenith)), 0.0)).sum() * 60.0
    return result


@pytest.mark.parametrize("date", ["2001-03-21T00:00", "2000-06-10T18:00", "2023-11-03T06:00", "2024-02-29T12:00"])
def test_radiation_of_six_hours_agrees_with_pvlib(date: str) -> None:
    computed = toa_radiation(LAT, LON, CALENDAR.parse(date), CALENDAR, 360, window="next").astype(np.float64)
    expected = _integrate_with_pvlib(pd.Timestamp(date), 6)
    assert np.abs(computed - expected).max() < 1e-3 * expected.max()
    weights = np.cos(np.deg2rad(LAT))[:, None]
    assert abs((weights * (computed - expected)).sum()) < 1e-3 * (weights * expected).sum()


def test_a_whole_day_agrees_with_pvlib_and_with_the_daily_mean() -> None:
    start = CALENDAR.parse("2001-05-07")
    day = toa_radiation(LAT, LON, start, CALENDAR, 1440, window="next").astype(np.float64)
    expected = _integrate_with_pvlib(pd.Timestamp("2001-05-07"), 24)
    assert np.abs(day - expected).max() < 1e-3 * expected.max()
    daily = toa_radiation(LAT, LON, start, CALENDAR, 1440, window="next", mean="daily")
    assert np.abs(day - daily).max() < 2e-3 * daily.max()  # the declination moves by 0.14 degrees within the day
    steps = sum(toa_radiation(LAT, LON, start + h * 60, CALENDAR, 360, window="next") for h in (0, 6, 12, 18))
    np.testing.assert_allclose(steps, day, rtol=1e-5, atol=10.0)


def test_the_daily_mean_is_the_textbook_closed_form() -> None:
    """The closed form is eq. 2.17 of Hartmann, Global Physical Climatology."""
    minutes = CALENDAR.parse("2003-08-01")
    declination, _, inverse_square = sun_position(minutes + 180, CALENDAR)
    lat = np.deg2rad(60.0)
    sunset = np.arccos(-np.tan(lat) * np.tan(declination))
    flux = SOLAR_CONSTANT * inverse_square / np.pi
    flux *= sunset * np.sin(lat) * np.sin(declination) + np.cos(lat) * np.cos(declination) * np.sin(sunset)
    computed = toa_radiation(np.array([60.0]), LON, minutes, CALENDAR, 360, window="next", mean="daily")
    np.testing.assert_allclose(computed, flux * 21600.0, rtol=1e-6)


@pytest.mark.parametrize("mean", ["step", "daily"])
def test_night_is_exactly_zero(mean: str) -> None:
    lat = np.linspace(90, 70, 21)
    for hour in range(0, 24, 3):
        minutes = CALENDAR.parse("2000-12-21") + hour * 60
        assert (toa_radiation(lat, LON, minutes, CALENDAR, 180, mean=mean) == 0).all()
    field = toa_radiation(np.array([0.0]), np.array([180.0]), CALENDAR.parse("2000-03-20T15:00"), CALENDAR, 360)
    assert field.item() == 0  # 09..15 UTC at the date line, across local midnight


def test_windows_are_the_steps_before_and_after() -> None:
    minutes = CALENDAR.parse("2001-01-01T06:00")
    past = toa_radiation(LAT, LON, minutes, CALENDAR, 360, window="past")
    np.testing.assert_array_equal(past, toa_radiation(LAT, LON, minutes - 360, CALENDAR, 360, window="next"))
    # At longitude 90 the Sun is highest at 06 UTC, so 00 to 06 UTC is the morning and 18 to 00 UTC is night.
    assert past[5, 2] > toa_radiation(LAT, LON, minutes - 360, CALENDAR, 360, window="past")[5, 2]


def test_annual_global_mean_is_a_quarter_of_the_irradiance() -> None:
    lat = np.arange(-89.0, 90.0, 2.0)
    days = [toa_radiation(lat, np.array([0.0]), d * 1440, CALENDAR, 1440, mean="daily")[:, 0] for d in range(0, 365, 5)]
    weights = np.cos(np.deg2rad(lat))
    flux = (np.mean(days, axis=0) * weights).sum() / weights.sum() / 86400.0
    eccentricity = 0.01671
    assert flux == pytest.approx(SOLAR_CONSTANT / 4 / np.sqrt(1 - eccentricity**2), rel=1e-3)


@pytest.mark.parametrize("calendar_name", ["noleap", "360_day", "all_leap"])
def test_model_calendars_follow_the_fraction_of_the_year(calendar_name: str) -> None:
    calendar = Calendar(calendar_name)
    for fraction in (0.1, 0.6):
        daily = []
        for tested_calendar in (calendar, CALENDAR):
            begin = tested_calendar.parse("2001-01-01")
            end = tested_calendar.parse("2002-01-01")
            minutes = begin + round(fraction * (end - begin))
            daily.append(toa_radiation(LAT, LON, minutes, tested_calendar, 2, mean="daily"))
        # 0.6 of 365 days differ from 0.6 of the Sun's year by 0.15 days.
        assert np.abs(daily[0] - daily[1]).max() < 3e-3 * daily[1].max()
    first, later = (calendar.parse(f"{year}-04-01T06:00") for year in (1950, 2099))
    np.testing.assert_array_equal(*(toa_radiation(LAT, LON, t, calendar, 360) for t in (first, later)))


def test_era5_irradiance_follows_the_cycle_and_is_held_before_the_series() -> None:
    assert era5_irradiance(CALENDAR.parse("2000-07-01T12:00"), CALENDAR) == pytest.approx(0.9965 * 1366.6836, abs=2e-3)
    assert era5_irradiance(CALENDAR.parse("2013-07-02"), CALENDAR) == pytest.approx(0.9965 * 1366.6836, abs=2e-3)
    between = era5_irradiance(CALENDAR.parse("2009-01-01"), CALENDAR)
    assert between == pytest.approx(0.9965 * (1365.6918 + 1365.6121) / 2, abs=1e-6)
    assert era5_irradiance(CALENDAR.parse("1900-01-01"), CALENDAR) == pytest.approx(0.9965 * 1365.9242)
    minutes = CALENDAR.parse("2000-07-01T12:00")
    fields = [toa_radiation(LAT, LON, minutes, CALENDAR, 360, tsi=tsi) for tsi in ("era5", "constant")]
    np.testing.assert_allclose(fields[0], fields[1] * (0.9965 * 1366.6836 / SOLAR_CONSTANT), rtol=1e-5)


def test_encodings_equal_their_definitions() -> None:
    grid = _build_grid()
    solar = SolarConfig()
    fields = {
        name: compute_dynamic_forcing(name, CALENDAR.parse("2001-07-02T12:00"), CALENDAR, grid, 360, solar)
        for name in COMPUTED_DYNAMIC
    }
    assert all(field.shape == grid.shape and field.dtype == np.float32 for field in fields.values())
    np.testing.assert_allclose(fields["cos_year"], -1.0, atol=1e-6)  # the middle of 2001
    np.testing.assert_allclose(fields["sin_year"], 0.0, atol=1e-6)
    np.testing.assert_allclose(fields["cos_day"][:, 0], -1.0, atol=1e-6)  # noon at Greenwich
    np.testing.assert_allclose(fields["cos_day"][:, 18], 1.0, atol=1e-6)  # midnight at the date line
    np.testing.assert_allclose(fields["sin_day"][:, 9], -1.0, atol=1e-6)  # 18 h at 90 E
    expected = toa_radiation(grid.lat, grid.lon, CALENDAR.parse("2001-07-02T12:00"), CALENDAR, 360)
    np.testing.assert_array_equal(fields["toa_incident_solar_radiation"], expected)
    static = {name: compute_static(name, grid) for name in COMPUTED_STATIC}
    assert static["sin_latitude"][0, 0] == 1
    assert static["sin_latitude"][-1, 5] == -1
    np.testing.assert_allclose(static["sin_longitude"] ** 2 + static["cos_longitude"] ** 2, 1.0, rtol=1e-6)
    assert static["sin_longitude"][3, 9] == pytest.approx(1.0)


@pytest.mark.parametrize("mean", ["step", "daily"])
def test_fixed_statistics_are_those_of_a_year(mean: str) -> None:
    grid = _build_grid(37, 24)
    solar = SolarConfig(mean=mean)
    year = np.stack(
        [
            compute_dynamic_forcing("toa_incident_solar_radiation", d * 1440 + h * 60, CALENDAR, grid, 360, solar)
            for d in range(0, 365, 15)
            for h in (0, 6, 12, 18)
        ]
    ).astype(np.float64)
    expected_mean, expected_std = get_fixed_statistics("toa_incident_solar_radiation", 360, solar)
    assert year.mean() == pytest.approx(expected_mean, rel=0.02)
    assert year.std() == pytest.approx(expected_std, rel=0.02)
    assert get_fixed_statistics("sin_year", 360, solar) == (0.0, 1.0)


def test_a_one_degree_field_takes_less_than_50_ms() -> None:
    lat = np.linspace(90, -90, 181)
    lon = np.arange(360.0)
    durations = []
    for repeat in range(5):
        begin = time.perf_counter()
        toa_radiation(lat, lon, repeat * 360, CALENDAR, 360)
        durations.append(time.perf_counter() - begin)
    assert min(durations) < 0.05
