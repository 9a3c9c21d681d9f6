"""Tests of the time policies of a source: exact, persist and cyclic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig
from credit.data.sources.accumulation import TimeAggregation
from credit.data.sources.source_reader import open_sources
from credit.data.sources.time_axis import align_times
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import SPLITS, write_file

CALENDAR = Calendar()
DAY = 1440
START = CALENDAR.parse("2000-01-01")


def build_aggregation(times: list[int] | np.ndarray) -> TimeAggregation:
    times = np.asarray(times, dtype=np.int64)
    return TimeAggregation(times, [(np.ones(len(times)), np.arange(len(times)))])


def match_times(
    policy: str,
    source_times: list[int] | np.ndarray,
    run_times: list[int] | np.ndarray,
    calendar: Calendar = CALENDAR,
) -> tuple[list[int], list[int]]:
    """Return the times of the run, and for each the index of the value of a forcing."""
    aggregations = {"t": build_aggregation(run_times), "f": build_aggregation(source_times)}
    times, indices = align_times(aggregations, {"t": "exact", "f": policy}, calendar)
    return times.tolist(), indices["f"].tolist()


def test_exact_policy_uses_common_times() -> None:
    assert match_times("exact", [0, 12, 18, 24], [6, 12, 24, 30]) == ([12, 24], [1, 3])


def test_persist_policy_uses_a_value_until_the_next() -> None:
    week = 7 * DAY
    source_times = START + week * np.array([0, 1, 2, 4])
    daily = START + DAY * np.arange(-2, 50)
    times, indices = match_times("persist", source_times, daily)
    # Brute force. The longest interval is two weeks, so the last value is valid for two weeks.
    expected = [
        (int(t), int(np.flatnonzero(source_times <= t)[-1])) for t in daily if START <= t <= source_times[-1] + 2 * week
    ]
    assert list(zip(times, indices, strict=True)) == expected


def test_cyclic_policy_uses_one_year_for_all_years() -> None:
    months = [CALENDAR.parse(f"{2014 + (m < 4)}-{m:02d}-15") for m in (4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3)]
    dates = ["2000-01-01", "2000-02-29", "2000-03-14T18:00", "2000-03-15", "2001-12-31T18:00", "2003-07-14T23:00"]
    times, indices = match_times("cyclic", months, [CALENDAR.parse(date) for date in dates])
    assert [CALENDAR.format(months[index])[5:10] for index in indices] == [
        "12-15", "02-15", "02-15", "03-15", "12-15", "06-15",
    ]  # fmt: skip
    assert len(times) == len(dates)
    with pytest.raises(DataError, match="f is from a source with times: cyclic.*2000-01-01T00:00 to 2001-01-02"):
        match_times("cyclic", START + DAY * np.arange(368), [START])


@pytest.mark.parametrize(
    ("calendar_name", "first", "days"),
    [
        ("standard", "2000-01-01", 366),
        ("standard", "2001-01-01", 365),
        ("standard", "2000-03-01", 365),
        ("noleap", "2000-01-01", 365),
        ("all_leap", "2001-01-01", 366),
        ("360_day", "2000-01-01", 360),
    ],
)
def test_a_representative_year_has_the_length_of_its_calendar(calendar_name: str, first: str, days: int) -> None:
    calendar = Calendar(calendar_name)
    start = calendar.parse(first)
    run_times = start + DAY * np.arange(10)
    _, indices = match_times("cyclic", start + DAY * np.arange(days), run_times, calendar)
    assert indices == list(range(10))
    with pytest.raises(DataError, match="one representative year, but its times range from"):
        match_times("cyclic", start + DAY * np.arange(days + 1), run_times, calendar)


def test_sources_with_different_values_of_times_are_read_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state, sst = (rng.normal(280, 5, (count, 4, 8)).astype(np.float32) for count in (40, 12))
    write_file(tmp_path / "state.nc", {"t2m": state}, hours=6.0 * np.arange(40))
    write_file(tmp_path / "slow.nc", {"sst": sst}, hours=24.0 * np.arange(12))
    settings = {
        "variables": {"prognostic": {"vars_2D": ["t2m"]}, "dynamic_forcing": {"vars_2D": ["sst"]}},
        "splits": SPLITS,
        "split_gap": "1d",
    }

    def build_config(first: dict, second: dict) -> DataConfig:
        sources = [{"path": str(tmp_path / "state.nc"), **first}, {"path": str(tmp_path / "slow.nc"), **second}]
        return DataConfig.model_validate({**settings, "sources": sources})

    assert len(open_sources(build_config({}, {})).times) == 10
    reader = open_sources(build_config({}, {"times": "persist"}))
    assert len(reader.times) == 40
    for index in range(40):
        np.testing.assert_array_equal(reader.read(index), np.stack([state[index], sst[index // 4]]))
    with pytest.raises(DataError, match=r"data.sources.0.times: cyclic is for forcing, but t2m is predicted"):
        open_sources(build_config({"times": "cyclic"}, {}))
