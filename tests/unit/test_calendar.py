"""Times and durations, compared with the standard library and cftime."""

from __future__ import annotations

import datetime

import cftime
import numpy as np
import pytest

from credit.calendar import CALENDARS, TIME_UNITS, Calendar, format_duration, parse_duration
from credit.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("text", "minutes"), [("6h", 360), ("30min", 30), ("10d", 14400), (24, 1440), ("0.5h", 30), (" 1.5 d ", 2160)]
)
def test_durations(text: str, minutes: int) -> None:
    assert parse_duration(text) == minutes


@pytest.mark.parametrize("text", ["", "6 weeks", "-6h", "0h", "0.3min", "h", "6h30"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="data.timestep"):
        parse_duration(text, "data.timestep")


def test_durations_are_formatted() -> None:
    for minutes in (30, 60, 360, 1440, 90):
        assert parse_duration(format_duration(minutes)) == minutes
    assert format_duration(360) == "6h" and format_duration(90) == "90min"


def test_minutes_equal_those_of_the_standard_library() -> None:
    epoch = datetime.datetime(1900, 1, 1)
    for text in ("1850-06-01T00:00", "1900-03-01T00:00", "2000-02-29T18:00", "2024-12-31T23:59"):
        expected = (datetime.datetime.fromisoformat(text) - epoch).total_seconds() / 60
        assert Calendar().parse(text) == expected
        assert Calendar().format(Calendar().parse(text)) == text


@pytest.mark.parametrize(
    ("calendar_name", "days"), [("standard", 366), ("noleap", 365), ("all_leap", 366), ("360_day", 360)]
)
def test_the_length_of_the_year_2000(calendar_name: str, days: int) -> None:
    calendar = Calendar(calendar_name)
    assert calendar.parse("2001-01-01") - calendar.parse("2000-01-01") == days * 1440


def test_the_day_after_28_february() -> None:
    next_day = {name: Calendar(name).format(Calendar(name).parse("2001-02-28") + 1440)[:10] for name in CALENDARS}
    assert next_day["standard"] == next_day["noleap"] == next_day["julian"] == "2001-03-01"
    assert next_day["all_leap"] == next_day["360_day"] == "2001-02-29"


def test_aliases_and_unknown_calendars() -> None:
    assert Calendar("gregorian") == Calendar() and Calendar("365_day") == Calendar("noleap")
    with pytest.raises(DataError, match='"360day" is not a CF calendar; did you mean "360_day"'):
        Calendar("360day")
    # The proposed name may be an alias of a calendar.
    with pytest.raises(DataError, match='"365_days" is not a CF calendar; did you mean "365_day"'):
        Calendar("365_days")


@pytest.mark.parametrize("text", ["2001-02-29", "2001-13-01", "01-02-2001", "2001-01-01T25:00", "soon", "2001-01"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="data.splits.train"):
        Calendar().parse(text, "data.splits.train")


def test_seconds_are_refused_except_at_the_end_of_a_period() -> None:
    for text in ("2000-01-01T06:00:30", "1850-01-01T06:00:30"):
        with pytest.raises(ConfigError, match='inference.initial_times: ".*" is not a whole minute.* 30 seconds'):
            Calendar().parse(text, "inference.initial_times")
    assert Calendar().parse("2000-01-01T06:00:00") == Calendar().parse("2000-01-01T06:00")
    for day in ("1850-12-31", "2000-12-31"):
        last_minute = Calendar().parse(f"{day}T23:59")
        assert Calendar().parse_period_end(f"{day}T23:59:59") == Calendar().parse_period_end(day) == last_minute


def test_a_date_as_an_end_means_the_whole_day() -> None:
    calendar = Calendar()
    assert calendar.parse_period_end("2001-03-10") == calendar.parse("2001-03-10T23:59")
    assert calendar.parse_period_end("2001-03-10T06:00") == calendar.parse("2001-03-10T06:00")
    assert calendar.parse("2001-03-10 06") == calendar.parse("2001-03-10T06:00Z") == calendar.parse("2001-03-10T06")


@pytest.mark.parametrize(
    ("values", "units", "calendar_name", "expected"),
    [
        ([876576.0, 876582.0], "hours since 1900-01-01 00:00:00", "standard", ["2000-01-01T00:00", "2000-01-01T06:00"]),
        ([0.25], "days since 2001-02-28", "noleap", ["2001-02-28T06:00"]),
        ([730121.0], "days since 0000-1-1", "noleap", ["2000-05-02T00:00"]),
        ([1, 2], "minutes since 1970-01-01 00:00:00.0", "360_day", ["1970-01-01T00:01", "1970-01-01T00:02"]),
        ([59.99999], "seconds since 2000-01-01", "standard", ["2000-01-01T00:01"]),
        ([1 / 3], "days since 2000-01-01", "proleptic_gregorian", ["2000-01-01T08:00"]),
    ],
)
def test_cf_times(values: list, units: str, calendar_name: str, expected: list[str]) -> None:
    calendar = Calendar(calendar_name)
    minutes = calendar.minutes_from_cf(np.array(values), units)
    assert minutes.dtype == np.int64
    assert [calendar.format(value) for value in minutes] == expected


@pytest.mark.parametrize("name", CALENDARS)
@pytest.mark.parametrize("units", ["hours since 1500-03-01", "days since 1850-01-01", "seconds since 1970-01-01 12:30"])
def test_decoded_times_equal_those_of_cftime(name: str, units: str) -> None:
    per_day = {"hours": 24, "days": 1, "seconds": 86400}[units.split()[0]]
    minutes = np.random.default_rng(0).integers(-(10**7), 10**7, (100, 2))
    values = minutes * per_day / 1440
    expected = cftime.date2num(cftime.num2date(values, units, name), TIME_UNITS, name)
    np.testing.assert_array_equal(Calendar(name).minutes_from_cf(values, units), np.rint(expected.astype(float)))


def test_unknown_time_units_are_refused() -> None:
    with pytest.raises(DataError, match='"fortnights since 2000-01-01"'):
        Calendar().minutes_from_cf(np.array([1.0]), "fortnights since 2000-01-01")


@pytest.mark.parametrize("calendar_name", CALENDARS)
def test_year_fraction(calendar_name: str) -> None:
    calendar = Calendar(calendar_name)
    begin, end = calendar.parse("2004-01-01"), calendar.parse("2005-01-01")
    times = np.array([[begin, end - 1], [(begin + end) // 2, end]])
    fractions = calendar.year_fraction(times)
    np.testing.assert_allclose(fractions, [[0.0, 1.0 - 1.0 / (end - begin)], [0.5, 0.0]], atol=1e-12)
    assert calendar.year_fraction(np.array(begin)).shape == ()


@pytest.mark.parametrize("calendar_name", CALENDARS)
def test_year_fraction_equals_that_of_cftime(calendar_name: str) -> None:
    calendar = Calendar(calendar_name)
    random_times = np.random.default_rng(0).integers(-500 * 525_960, 500 * 525_960, 200)
    # The first minute of a year, and the last one of the year before.
    year_edges = []
    for year in (1600, 1900, 1999, 2000, 2001, 2400):
        new_year = calendar.parse(f"{year}-01-01")
        year_edges += [new_year - 1, new_year]
    times = np.concatenate([random_times, year_edges])
    expected = []
    for minutes in times.tolist():
        year = calendar.datetime(minutes).year
        begin, end = calendar.parse(f"{year}-01-01"), calendar.parse(f"{year + 1}-01-01")
        expected.append((minutes - begin) / (end - begin))
    np.testing.assert_array_equal(calendar.year_fraction(times), expected)


def test_day_fraction() -> None:
    calendar = Calendar()
    times = np.array([calendar.parse("1899-12-31T18:00"), calendar.parse("2000-01-01T06:00")])
    np.testing.assert_allclose(calendar.day_fraction(times), [0.75, 0.25])
