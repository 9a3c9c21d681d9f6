"""Tests of windowed climatologies against xarray's means by day of the year, with and without leap years."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.data import PreprocessConfig
from credit.config.sections.verification import ClimatologyConfig
from credit.data.climatology import stored
from credit.data.climatology.climatology import Climatology
from credit.data.climatology.fit import fit_climatology
from credit.data.climatology.stored import load_or_fit_climatology, preprocess_climatology
from credit.data.reader import open_reader
from credit.data.splits import build_splits
from credit.data.store.preprocess import write_training_store
from credit.errors import ConfigError
from tests.unit.analytic_reader import AnalyticReader, make_grid
from tests.unit.data.climatology.test_stored import make_conf
from tests.unit.data.files_on_the_fly import write_file

CHANNELS = ChannelMap.build({"prognostic": {"vars_3D": [], "vars_2D": ["t2m"]}}, [])
GRID = make_grid(2, 4)


def _build_times(calendar_name: str, years: int, every: int) -> tuple[Calendar, np.ndarray]:
    calendar = Calendar(calendar_name)
    return calendar, np.arange(calendar.parse("1990-01-01"), calendar.parse(f"{1990 + years}-01-01"), every)


def _fit(calendar: Calendar, times: np.ndarray, values: np.ndarray, **options: object) -> Climatology:
    """Fit a climatology to fields that are constant in space, with one value for each time."""
    index = {int(minutes): number for number, minutes in enumerate(times)}
    reader = AnalyticReader(
        CHANNELS, GRID, calendar, times, lambda minutes, _: np.full(GRID.shape, values[index[minutes]])
    )
    conf = ClimatologyConfig(method="window", **options)
    return fit_climatology(reader, ["t2m"], int(times[0]), int(times[-1]), conf)


def _build_series(calendar: Calendar, times: np.ndarray, values: np.ndarray) -> xr.DataArray:
    dates = [calendar.datetime(int(minutes)) for minutes in times]
    return xr.DataArray(values, dims="time", coords={"time": xr.CFTimeIndex(dates)})


def _compute_running_mean(means: xr.DataArray, days: int) -> xr.DataArray:
    """Return the running mean of daily means, which continues across the end of the year."""
    rolling_means = means.pad(dayofyear=days, mode="wrap").rolling(dayofyear=days, center=True).mean()
    return rolling_means.isel(dayofyear=slice(days, -days)).assign_coords(dayofyear=means.dayofyear)


@pytest.mark.parametrize("calendar_name", ["noleap", "360_day"])
@pytest.mark.parametrize("every", [1440, 720])
@pytest.mark.parametrize("by_hour", [False, True])
@pytest.mark.parametrize("days", [1, 5])
def test_a_window_is_a_running_mean_of_days_of_the_year(
    calendar_name: str, every: int, by_hour: bool, days: int
) -> None:
    calendar, times = _build_times(calendar_name, 10 if days == 1 else 2, every)
    values = np.random.default_rng(0).normal(280, 9, len(times))
    climatology = _fit(calendar, times, values, window_days=days, by_hour=by_hour)
    series = _build_series(calendar, times, values)
    for hour in np.unique(series.time.dt.hour):
        series_of_hour = series.isel(time=series.time.dt.hour == hour) if by_hour else series
        expected = _compute_running_mean(series_of_hour.groupby("time.dayofyear").mean(), days)
        # Without by_hour, the climatology is valid at the mean of the times of a day.
        minute = hour * 60 if by_hour else (1440 - every) // 2
        computed = [
            climatology.evaluate(calendar.parse("2003-01-01") + 1440 * day + minute)[0, 0, 0]
            for day in range(len(expected))
        ]
        np.testing.assert_allclose(computed, expected, rtol=1e-6)


@pytest.mark.parametrize("every", [1440, 720])
@pytest.mark.parametrize("by_hour", [False, True])
@pytest.mark.parametrize("days", [1, 2, 5])
def test_leap_years_are_divided_into_365_days(every: int, by_hour: bool, days: int) -> None:
    """A time belongs to the day of the climatology that is nearest by fraction of the year. xarray adds up the days."""
    calendar, times = _build_times("standard", 12 if days == 1 else 4, every)
    values = np.random.default_rng(0).normal(280, 9, len(times))
    climatology = _fit(calendar, times, values, window_days=days, by_hour=by_hour)
    series = _build_series(calendar, times, values)
    hours = series.time.dt.hour
    days_into_year = (series.time.dt.dayofyear - 1 + hours / 24) / (365 + (series.time.dt.year % 4 == 0)) * 365
    middle_of_day = hours / 24 if by_hour else (24 - every / 60) / 48
    day_index = np.floor((days_into_year - middle_of_day).round(9) + (days % 2) / 2).astype(int) % 365
    for hour_of_day in np.unique(hours) if by_hour else [None]:
        selection = slice(None) if hour_of_day is None else (hours == hour_of_day).values
        grouped = series[selection].groupby(day_index[selection].rename("part"))
        sums = grouped.sum().values
        counts = grouped.count().values
        # Odd windows are symmetric. Even windows have one more day before than after.
        shifts = range(-(days // 2), days - days // 2)
        mean = sum(np.roll(sums, -shift) for shift in shifts) / sum(np.roll(counts, -shift) for shift in shifts)
        hour_index = 0 if hour_of_day is None else np.unique(hours).tolist().index(hour_of_day)
        np.testing.assert_allclose(climatology.fields[hour_index, :, 0, 0, 0], mean, rtol=1e-6)


@pytest.mark.parametrize("days", [1, 3, 11, 61])
def test_every_year_has_the_same_weight_at_midnight(days: int) -> None:
    calendar, times = _build_times("standard", 12, 1440)
    is_leap_year = np.array([calendar.datetime(int(minutes)).year % 4 == 0 for minutes in times], dtype=np.float64)
    leap_share = _fit(calendar, times, is_leap_year, window_days=days).fields[0, :, 0, 0, 0]
    # Three of twelve years are leap years. Their share is largest where the window has one more day of these years.
    max_share = 3 * (days + 1) / (3 * (days + 1) + 9 * days)
    if days <= 12:
        assert (np.abs(leap_share - 0.25) < 1e-6).sum() == 365 - days
        np.testing.assert_allclose(leap_share[np.abs(leap_share - 0.25) > 1e-6], max_share, rtol=1e-6)
    assert leap_share.min() > 0.24
    assert leap_share.max() <= max_share + 1e-6


@pytest.mark.parametrize("calendar_name", ["standard", "noleap", "360_day", "julian"])
def test_ten_years_are_counted_as_ten_in_every_calendar(calendar_name: str) -> None:
    calendar, times = _build_times(calendar_name, 10, 1440)
    climatology = _fit(calendar, times, np.zeros(len(times)), window_days=1)
    assert climatology.years == 10.0
    with pytest.raises(ConfigError, match=r"at least 10 years of training data, there are 9\.8"):
        _fit(calendar, times[:-70], np.zeros(len(times) - 70), window_days=1)


@pytest.mark.parametrize("calendar_name", ["standard", "noleap", "360_day"])
def test_five_complete_years_cause_no_warning(calendar_name: str) -> None:
    calendar = Calendar(calendar_name)
    times = np.arange(calendar.parse("2001-01-01"), calendar.parse("2006-01-01"), 360)
    climatology = _fit(calendar, times, np.zeros(len(times)), window_days=61)
    assert climatology.years == 5.0
    assert climatology.short_period_warning is None
    shorter = _fit(calendar, times[:-360], np.zeros(len(times) - 360), window_days=61)
    assert shorter.short_period_warning == "The climatology is from 4.8 years of data, less than 5."


def test_round_trip_through_a_dict() -> None:
    calendar, times = _build_times("standard", 10, 720)
    climatology = _fit(calendar, times, np.arange(len(times)) % 99.0, window_days=5, by_hour=True)
    restored = Climatology.from_dict(climatology.to_dict())
    assert restored.centres == climatology.centres == (0.0, 0.5 / 365)
    np.testing.assert_array_equal(restored.evaluate(12240), climatology.evaluate(12240))


@pytest.mark.parametrize(("method", "kept"), [("window", False), ("harmonic", True)])
def test_windowed_climatology_of_an_earlier_version_is_fitted_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, kept: bool
) -> None:
    rng = np.random.default_rng(0)
    fields = {"t2m": rng.normal(280, 9, (304, 4, 8)).astype(np.float32)}
    source = write_file(tmp_path / "a.nc", fields, np.arange(304) * 36)
    conf = make_conf(source, tmp_path, variables={"prognostic": {"vars_2D": ["t2m"]}}, variable_options={})
    write_training_store(conf, progress=False)
    climatology_config = ClimatologyConfig(method=method)
    settings = PreprocessConfig(climatology=True)
    preprocess_climatology(conf, settings, climatology_config, progress=False)
    group = zarr.open_group(Path(conf.store) / "climatology", mode="r+")
    meta = dict(group.attrs)["credit"] | {"format": 1}
    del meta["centres"]
    group.attrs["credit"] = meta
    reader = open_reader(conf)
    train = build_splits(conf, reader.calendar)["train"]
    with caplog.at_level(logging.INFO):
        load_or_fit_climatology(reader, ["t2m"], train, climatology_config)
    expected = "read from the store" if kept else "fitted now .*of another version .*run credit preprocess again"
    assert re.search(expected, caplog.text), caplog.text
    preprocess_climatology(conf, settings, climatology_config, progress=False)
    assert stored.describe_mismatch(Path(conf.store), climatology_config, train) is None
    new_meta = dict(zarr.open_group(Path(conf.store) / "climatology", mode="r").attrs)["credit"]
    assert new_meta["format"] == 2 - kept
