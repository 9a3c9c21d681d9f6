"""Tests of the splits: the gap between them, samples that stay inside them, and overlap with training periods."""

from __future__ import annotations

import numpy as np
import pytest

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig
from credit.data.splits import (
    Split,
    build_splits,
    describe_missing_times,
    find_initial_times,
    find_overlap,
    require_no_leakage,
    require_samples,
)
from credit.errors import ConfigError, DataError

CALENDAR = Calendar()


def build_config(**changes: object) -> DataConfig:
    settings = {
        "sources": [{"path": "x.nc"}],
        "variables": {"prognostic": {"vars_2D": ["t2m"]}},
        "splits": {
            "train": ["2000-01-01", "2000-01-31"],
            "valid": ["2000-02-10", "2000-02-20"],
            "test": ["2000-03-01", "2000-03-10"],
        },
        "split_gap": "9d",
    }
    return DataConfig.model_validate({**settings, **changes})


def test_splits_include_whole_days_and_respect_the_gap() -> None:
    splits = build_splits(build_config(), CALENDAR)
    assert CALENDAR.format(splits["train"].last) == "2000-01-31T23:59"
    with pytest.raises(ConfigError, match=r"split_gap \(240h\)"):
        build_splits(build_config(split_gap="10d"), CALENDAR)


def test_period_that_ends_before_its_start_is_refused() -> None:
    splits = {"train": ["2000-02-01", "2000-01-01"], "valid": ["2000-03-01", "2000-03-02"],
                "test": ["2000-05-01", "2000-05-02"]}  # fmt: skip
    with pytest.raises(ConfigError, match="data.splits.train: 2000-01-01 is before 2000-02-01"):
        build_splits(build_config(splits=splits), CALENDAR)


def test_overlapping_periods_are_refused() -> None:
    splits = {"train": ["2000-01-01", "2000-12-31"], "valid": ["2000-03-01", "2000-03-02"],
              "test": ["2001-05-01", "2001-05-02"]}  # fmt: skip
    with pytest.raises(ConfigError, match=r"valid 2000-03-01T00:00..2000-03-02T23:59 overlaps data.splits.train"):
        build_splits(build_config(splits=splits), CALENDAR)


def test_period_of_one_time_is_refused() -> None:
    splits = {"train": ["2000-02-01T06:00", "2000-02-01T06:00"], "valid": ["2000-03-01", "2000-03-02"],
              "test": ["2000-05-01", "2000-05-02"]}  # fmt: skip
    with pytest.raises(ConfigError, match="begins and ends at 2000-02-01T06:00.* at least two times"):
        build_splits(build_config(splits=splits), CALENDAR)


def test_a_sample_lies_inside_its_split_and_crosses_no_gap() -> None:
    split = build_splits(build_config(), CALENDAR)["train"]
    first = CALENDAR.parse("1999-12-25")
    times = first + 360 * np.arange(400)
    times = np.delete(times, 100)  # one time is missing
    initial_times = find_initial_times(times, split, 360, history_len=2, forecast_len=3)
    times_inside = set(times[(times >= split.first) & (times <= split.last)].tolist())
    for initial in initial_times.tolist():
        assert {initial + k * 360 for k in range(-1, 4)} <= times_inside
    # The reference checks every time by brute force.
    expected = [t for t in times.tolist() if {t + k * 360 for k in range(-1, 4)} <= times_inside]
    assert initial_times.tolist() == expected
    assert 0 < len(expected) < len(times_inside)


def test_error_explains_why_there_is_no_sample() -> None:
    split = build_splits(build_config(), CALENDAR)["train"]
    times = split.first + 720 * np.arange(30)
    missing = r"29 times are missing: 2000-01-01T06:00; 2000-01-01T18:00; 2000-01-02T06:00; \.\.\."
    with pytest.raises(DataError, match=rf"need 2 consecutive times.*{missing}"):
        require_samples(times, split, CALENDAR, build_config(), 1)
    with pytest.raises(DataError, match=r"usual interval between times is 12h: set data.timestep to 12h"):
        require_samples(times, split, CALENDAR, build_config(), 1)
    with pytest.raises(DataError, match="need 32 consecutive times.*; name more files in data.sources, or"):
        require_samples(split.first + 360 * np.arange(30), split, CALENDAR, build_config(), 31)
    with pytest.raises(DataError, match="no data in this period; the data have only 1999"):
        require_samples(np.array([CALENDAR.parse("1999-01-01")]), split, CALENDAR, build_config(), 1)


@pytest.mark.parametrize("calendar_name", ["standard", "noleap"])
def test_monthly_data_are_refused(calendar_name: str) -> None:
    calendar = Calendar(calendar_name)
    months = np.array([calendar.parse(f"2000-{month:02d}-01") for month in range(1, 13)])
    year = Split("train", int(months[0]), int(months[-1]))
    for timestep in ("30d", "31d"):
        with pytest.raises(DataError, match="months have different lengths.*calendar 360_day"):
            require_samples(months, year, calendar, build_config(timestep=timestep), 3)


def test_samples_start_at_the_configured_times() -> None:
    six_hourly_config = build_config(timestep="6h", sample_every="6h")
    split = build_splits(six_hourly_config, CALENDAR)["train"]
    times = np.arange(split.first, split.last + 1, 60)
    all_starts = require_samples(times, split, CALENDAR, build_config(), 1)
    six_hourly_starts = require_samples(times, split, CALENDAR, six_hourly_config, 1)
    assert len(all_starts) == len(times) - 6
    assert len(six_hourly_starts) == 31 * 4 - 1
    assert {int(t % 1440) // 60 for t in six_hourly_starts.tolist()} == {0, 6, 12, 18}
    starts_at_3_and_15 = require_samples(times, split, CALENDAR, build_config(init_hours=[3, 15]), 1)
    assert [CALENDAR.format(t)[-5:] for t in starts_at_3_and_15[:3]] == ["03:00", "15:00", "03:00"]
    starts_every_36h = require_samples(times, split, CALENDAR, build_config(init_hours=[0, 12], sample_every="18h"), 1)
    assert np.unique(np.diff(starts_every_36h)).tolist() == [36 * 60]
    test_split = build_splits(six_hourly_config, CALENDAR)["test"]
    test_times = np.arange(test_split.first, test_split.last + 1, 60)
    assert len(require_samples(test_times, test_split, CALENDAR, six_hourly_config, 1)) == len(test_times) - 6, (
        "forecasts have their own times"
    )
    with pytest.raises(DataError, match=r"data.init_hours \[1\].*which begin at 0, 6, 12, 18 UTC"):
        require_samples(times[::6], split, CALENDAR, build_config(init_hours=[1]), 1)


@pytest.mark.parametrize("bad", [{"sample_every": "0h"}, {"sample_every": "often"}, {"init_hours": [24]}])
def test_invalid_settings_of_sample_starts_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        build_config(**bad)


@pytest.mark.parametrize(
    ("period", "overlaps"),
    [
        (("2000-12-01", "2001-04-01"), True),  # a date without a time is a whole day
        (("2000-12-01T00:00", "2001-04-01T00:00"), True),
        (("2000-12-01", "2001-03-31"), False),
        (("2001-06-30T23:00", "2002-01-01T00:00"), True),
        (("2001-07-01", "2002-01-01"), False),
        (("2001-05-01T06:00", "2001-05-02T00:00"), True),
        (("1950-01-01", "2100-02-30"), True),  # a date of another calendar
    ],
)
def test_overlap_with_training_periods_is_found(period: tuple[str, str], overlaps: bool) -> None:
    calendar = Calendar("noleap")
    test_split = Split("test", calendar.parse("2001-04-01"), calendar.parse_period_end("2001-06-30"))
    assert find_overlap(test_split, [("1990-01-01", "1990-02-01"), period], calendar) == (period if overlaps else None)
    if overlaps:
        with pytest.raises(ConfigError, match=rf"test 2001-04-01.*: that has seen .* on {period[0]} to {period[1]};"):
            require_no_leakage(test_split, [period], "that", calendar)


@pytest.mark.parametrize(
    ("hours", "expected"),
    [
        ([0, 6, 12], "there is no gap"),
        ([0, 6, 18], "1 time is missing: 2000-01-01T12:00"),
        ([0, 24, 30, 42], "4 times are missing: 2000-01-01T06:00 to 2000-01-01T18:00; 2000-01-02T12:00"),
        # Times that are not on the time steps: one step is missing between 0 and 9 h.
        ([0, 9, 15], "1 time is missing: 2000-01-01T06:00"),
    ],
)
def test_missing_times_are_named(hours: list[int], expected: str) -> None:
    times = CALENDAR.parse("2000-01-01") + 60 * np.array(hours)
    assert describe_missing_times(times, CALENDAR, 360) == expected
