"""Tests that published scores are shown only if grid, years and truth are those of the table."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from credit.calendar import Calendar
from credit.verify.report.reference_scores import (
    compare_with_published,
    load_published_scores,
    select_comparable_scores,
)
from credit.verify.table.table import ScoreTable

CALENDAR = Calendar()


def build_initial_times(first: str, last: str, every: float = 0.5) -> np.ndarray:
    """Return initial times in minutes, which are `every` days apart."""
    return np.arange(CALENDAR.parse(first), CALENDAR.parse(last) + 1, int(1440 * every))


ALL_TIMES = build_initial_times("2017-01-01T00:00", "2018-12-31T12:00")


def build_score_table(truth: str = "era5/*.nc") -> ScoreTable:
    """Return a table in which all RMSE, at 3 and 5 days, are 500."""
    dims = ("forecast", "season", "channel", "lead", "region")
    coords = {
        "forecast": ["model"], "season": ["all"], "channel": ["z500", "t850"], "lead": [72.0, 120.0],
        "region": ["global"], "units": ("channel", ["m2 s-2", "degC"]),
    }  # fmt: skip
    data = {"rmse": (dims, np.full((1, 1, 2, 2, 1), 500.0))}
    return ScoreTable(xr.Dataset(data, coords, {"truth": truth}))


def test_scores_with_the_same_grid_years_and_truth_are_shown() -> None:
    comparable = select_comparable_scores(build_score_table(), 5.625, ALL_TIMES, CALENDAR)
    simple_baselines = {"persistence", "weekly climatology"}
    assert {published.system for published in comparable} == {
        "IFS operational",
        "IFS T63",
        "ResNet (Rasp and Thuerey)",
        *simple_baselines,
    }
    rows = compare_with_published(comparable, build_score_table())
    assert ("IFS T63", "z500", 120, 463, 500.0, "README of github.com/pangeo-data/WeatherBench") in rows
    assert {row[1] for row in rows} == {"z500"}, "temperature in other units is left out"


def test_units_in_the_spelling_of_era5_are_known() -> None:
    table_in_other_units = build_score_table()
    table_in_other_units.dataset["units"] = "channel", ["m**2 s**-2", "Kelvin"]
    rows = compare_with_published(
        select_comparable_scores(table_in_other_units, 5.625, ALL_TIMES, CALENDAR), table_in_other_units
    )
    assert {row[1] for row in rows} == {"z500", "t850"}


@pytest.mark.parametrize(
    ("unlike_table", "degrees", "cases"),
    [
        (build_score_table(), 1.0, ALL_TIMES),
        (build_score_table(truth="own/analysis.nc"), 5.625, ALL_TIMES),
        (build_score_table(), 5.625, build_initial_times("2018-01-01T00:00", "2018-12-31T12:00")),
        (build_score_table(), 5.625, build_initial_times("2017-01-01T00:00", "2019-01-02T00:00")),
        (build_score_table(), 5.625, np.array([ALL_TIMES[0], ALL_TIMES[-1]])),  # only two cases in the right years
        (build_score_table(), 5.625, build_initial_times("2017-01-01T00:00", "2018-12-31T12:00", 10)),
        (build_score_table(), 5.625, np.delete(ALL_TIMES, slice(300, 320))),
        (build_score_table(), 5.625, build_initial_times("2017-01-09T00:00", "2018-12-31T12:00")),
        (build_score_table(), 5.625, build_initial_times("2017-01-01T00:00", "2018-12-15T12:00")),
    ],
)
def test_scores_with_another_grid_years_or_truth_are_not_shown(
    unlike_table: ScoreTable, degrees: float, cases: np.ndarray
) -> None:
    assert select_comparable_scores(unlike_table, degrees, cases, CALENDAR) == []


@pytest.mark.parametrize(
    "cases",
    [
        # The last time is the last whose five days have truth in the years.
        build_initial_times("2017-01-01T06:00", "2018-12-26T06:00", 1),
        build_initial_times("2017-01-02T00:00", "2018-12-30T00:00", 5),
    ],
)
def test_initial_times_that_cover_the_years_suffice(cases: np.ndarray) -> None:
    assert select_comparable_scores(build_score_table(), 5.625, cases, CALENDAR)


def test_every_published_score_has_a_source() -> None:
    for published in load_published_scores():
        assert published.source
        assert published.years[0] <= published.years[1]
        assert published.truth == "ERA5"
        for scores in published.rmse.values():
            assert list(scores) == sorted(scores)
            assert all(score > 0 for score in scores.values())
