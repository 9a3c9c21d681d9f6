"""Tests of climatologies that are fitted to known annual cycles."""

from __future__ import annotations

import numpy as np
import pytest

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.verification import ClimatologyConfig
from credit.data.climatology.climatology import Climatology
from credit.data.climatology.fit import fit_climatology
from credit.errors import ConfigError, DataError
from tests.unit.analytic_reader import AnalyticReader, make_grid

CHANNELS = ChannelMap.build({"prognostic": {"vars_3D": ["z"], "vars_2D": ["t2m", "sst"]}}, [850.0, 500.0])
NAMES = [channel.name for channel in CHANNELS.time_varying_stored]
GRID = make_grid(6, 8)
PHASE = np.linspace(0.0, 0.5, GRID.shape[0])[:, None]


def _build_reader(
    calendar_name: str = "standard", start: str = "2000-01-01", end: str = "2002-01-01", every: int = 1440,
    noise: float = 0.0, diurnal: float = 0.0,
) -> AnalyticReader:  # fmt: skip
    calendar = Calendar(calendar_name)
    rng = np.random.default_rng(1)

    def function(minutes: int, channel: int) -> np.ndarray:
        fraction = calendar.year_fraction(np.array(minutes))
        cycle = 250.0 + channel + 20.0 * np.cos(2 * np.pi * (fraction - PHASE)) * np.ones(GRID.shape)
        cycle = cycle + diurnal * np.cos(2 * np.pi * calendar.day_fraction(np.array(minutes)))
        return cycle + noise * rng.standard_normal(GRID.shape)

    mask = np.zeros(GRID.shape, dtype=bool)
    mask[2, 3] = True
    times = np.arange(calendar.parse(start), calendar.parse(end), every)
    return AnalyticReader(CHANNELS, GRID, calendar, times, function, {"sst": mask})


def _fit(reader: AnalyticReader, **options: object) -> Climatology:
    return fit_climatology(reader, NAMES, int(reader.times[0]), int(reader.times[-1]), ClimatologyConfig(**options))


@pytest.mark.parametrize("calendar", ["standard", "noleap", "360_day"])
@pytest.mark.parametrize("options", [{"harmonics": 1}, {"harmonics": 3}, {"method": "window", "window_days": 15}])
def test_fit_recovers_an_annual_cycle_in_every_calendar(calendar: str, options: dict) -> None:
    reader = _build_reader(calendar)
    climatology = _fit(reader, **options)
    tolerance = 0.25 if "method" in options else 2e-3  # a mean over 15 days flattens a cosine by 0.3 %
    for date in ("2000-02-28", "2005-03-01", "2013-09-15T06:00", "2001-12-30T18:00"):
        minutes = reader.calendar.parse(date)
        expected = AnalyticReader(CHANNELS, GRID, reader.calendar, [minutes], reader._function, reader.masks).read(0)
        np.testing.assert_allclose(climatology.evaluate(minutes), expected, atol=tolerance)
    assert np.isnan(climatology.evaluate(minutes)[NAMES.index("sst"), 2, 3])
    assert climatology.evaluate(minutes).dtype == np.float32


def test_fit_uses_only_the_given_period() -> None:
    reader = _build_reader()
    calendar = reader.calendar
    start = calendar.parse("2001-01-01")
    cycle = reader._function
    reader._function = lambda minutes, channel: cycle(minutes, channel) + (1e6 if minutes < start else 0)
    climatology = fit_climatology(reader, NAMES, start, int(reader.times[-1]))
    assert (
        climatology.evaluate(calendar.parse("2001-06-01")).max(initial=0, where=~np.isnan(climatology.evaluate(0)))
        < 300
    )
    assert "2001-01-01 to 2001-12-31" in climatology.description
    assert climatology.short_period_warning
    assert "1.0 years" in climatology.short_period_warning


def test_harmonics_are_the_least_squares_fit() -> None:
    reader = _build_reader(noise=5.0, every=2880)
    climatology = _fit(reader, harmonics=2)
    angle = 2 * np.pi * reader.calendar.year_fraction(reader.times)
    design = np.stack([np.ones_like(angle), np.cos(angle), np.sin(angle), np.cos(2 * angle), np.sin(2 * angle)], 1)
    second_reader = _build_reader(noise=5.0, every=2880)  # a second reader with the same seed returns the same noise
    series = np.stack([second_reader.read(i)[0, 1, 1] for i in range(len(second_reader.times))]).astype(np.float64)
    expected, *_ = np.linalg.lstsq(design, series, rcond=None)
    np.testing.assert_allclose(climatology.fields[0, :, 0, 1, 1], expected, rtol=1e-5, atol=1e-4)


def test_fit_without_harmonics_is_the_mean() -> None:
    reader = _build_reader(start="2000-06-01", end="2000-06-11")
    climatology = _fit(reader, harmonics=0)
    expected = np.mean([reader.read(i) for i in range(10)], axis=0)
    np.testing.assert_allclose(climatology.evaluate(0), expected, rtol=1e-6)


def test_periods_that_are_too_short_are_refused() -> None:
    with pytest.raises(ConfigError, match="harmonics: 1 cannot be fitted to 61 times from 2000-01-01.*set it to 0"):
        _fit(_build_reader(end="2000-03-02"))
    with pytest.raises(ConfigError, match="no time around day"):
        _fit(_build_reader(end="2000-07-01"), method="window")


def test_unsmoothed_days_need_ten_years() -> None:
    with pytest.raises(ConfigError, match="needs at least 10 years of training data, there are 2.0"):
        _fit(_build_reader(), method="window", window_days=1)
    reader = _build_reader(end="2010-01-01")
    climatology = _fit(reader, method="window", window_days=1)
    assert climatology.fields.shape[1] == 365
    assert climatology.short_period_warning is None
    np.testing.assert_allclose(climatology.evaluate(reader.calendar.parse("2003-05-01")), reader.read(1216), atol=0.3)


def test_by_hour_separates_the_times_of_the_day() -> None:
    reader = _build_reader(every=360, diurnal=3.0)
    climatology = _fit(reader, by_hour=True)
    for hour in (0, 6, 12, 18):
        minutes = reader.calendar.parse(f"2001-04-01T{hour:02d}:00")
        np.testing.assert_allclose(climatology.evaluate(minutes), reader.read(reader.index_of(minutes)), atol=5e-3)
    with pytest.raises(DataError, match="at none of its times of the day"):
        climatology.evaluate(reader.calendar.parse("2001-04-01T03:00"))


@pytest.mark.parametrize(
    "options", [{"harmonics": 0}, {"harmonics": 2}, {"method": "window"}, {"method": "window", "window_days": 1}]
)
def test_lazy_evaluation_equals_evaluation_of_all_channels(options: dict) -> None:
    climatology = _fit(_build_reader(end="2010-01-01"), **options)
    minutes = Calendar().parse("2003-05-01T07:00")
    evaluated = climatology.evaluate(minutes)
    lazy = climatology.evaluate_lazily(minutes)
    assert evaluated.shape == lazy.shape
    assert evaluated.dtype == lazy.dtype
    assert lazy.ndim == 3
    for channel in range(len(NAMES)):
        np.testing.assert_array_equal(lazy[channel], evaluated[channel])
    for selection in (slice(1, 3), [3, 0]):
        np.testing.assert_array_equal(np.asarray(lazy[selection]), evaluated[selection])
    assert np.asarray(lazy, dtype=np.float64).dtype == np.float64
    lazy[0][:] = 0.0  # must not change the fields of the climatology
    if climatology.kind != "days":
        np.testing.assert_array_equal(climatology.evaluate(minutes), evaluated)


def test_round_trip_through_a_dict() -> None:
    climatology = _fit(_build_reader())
    restored = Climatology.from_dict(climatology.to_dict())
    np.testing.assert_array_equal(restored.evaluate(12345), climatology.evaluate(12345))
    assert restored.names == climatology.names
    assert restored.description == climatology.description
