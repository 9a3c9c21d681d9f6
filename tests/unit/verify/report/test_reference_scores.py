"""Published scores stand beside a table only where grid, years and truth are the same."""

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


def times(first: str, last: str, every: float = 0.5) -> np.ndarray:
    """Initial times in minutes, so many days apart."""
    return np.arange(CALENDAR.parse(first), CALENDAR.parse(last) + 1, int(1440 * every))


ALL = times("2017-01-01T00:00", "2018-12-31T12:00")


def table(truth: str = "era5/*.nc") -> ScoreTable:
    """A table with a z500 of 500 at 3 and 5 days."""
    dims = ("forecast", "season", "channel", "lead", "region")
    coords = {
        "forecast": ["model"], "season": ["all"], "channel": ["z500", "t850"], "lead": [72.0, 120.0],
        "region": ["global"], "units": ("channel", ["m2 s-2", "degC"]),
    }  # fmt: skip
    data = {"rmse": (dims, np.full((1, 1, 2, 2, 1), 500.0))}
    return ScoreTable(xr.Dataset(data, coords, {"truth": truth}))


def test_the_same_grid_years_and_truth() -> None:
    comparable = select_comparable_scores(table(), 5.625, ALL, CALENDAR)
    simple = {"persistence", "weekly climatology"}
    assert {published.system for published in comparable} == {
        "IFS operational",
        "IFS T63",
        "ResNet (Rasp and Thuerey)",
        *simple,
    }
    rows = compare_with_published(comparable, table())
    assert ("IFS T63", "z500", 120, 463, 500.0, "README of github.com/pangeo-data/WeatherBench") in rows
    assert {row[1] for row in rows} == {"z500"}, "temperature in other units is left out"


def test_units_as_era5_spells_them() -> None:
    table_in_other_units = table()
    table_in_other_units.dataset["units"] = "channel", ["m**2 s**-2", "Kelvin"]
    rows = compare_with_published(
        select_comparable_scores(table_in_other_units, 5.625, ALL, CALENDAR), table_in_other_units
    )
    assert {row[1] for row in rows} == {"z500", "t850"}


@pytest.mark.parametrize(
    ("unlike_table", "degrees", "cases"),
    [
        (table(), 1.0, ALL),
        (table(truth="own/analysis.nc"), 5.625, ALL),
        (table(), 5.625, times("2018-01-01T00:00", "2018-12-31T12:00")),
        (table(), 5.625, times("2017-01-01T00:00", "2019-01-02T00:00")),
        (table(), 5.625, np.array([ALL[0], ALL[-1]])),  # two cases of the right years
        (table(), 5.625, times("2017-01-01T00:00", "2018-12-31T12:00", 10)),
        (table(), 5.625, np.delete(ALL, slice(300, 320))),
        (table(), 5.625, times("2017-01-09T00:00", "2018-12-31T12:00")),
        (table(), 5.625, times("2017-01-01T00:00", "2018-12-15T12:00")),
    ],
)
def test_unlike_numbers_do_not_stand_side_by_side(unlike_table: ScoreTable, degrees: float, cases: np.ndarray) -> None:
    assert select_comparable_scores(unlike_table, degrees, cases, CALENDAR) == []


@pytest.mark.parametrize(
    "cases",
    [
        times("2017-01-01T06:00", "2018-12-26T06:00", 1),  # the last whose five days have truth in the years
        times("2017-01-02T00:00", "2018-12-30T00:00", 5),
    ],
)
def test_initial_times_that_cover_the_years_suffice(cases: np.ndarray) -> None:
    assert select_comparable_scores(table(), 5.625, cases, CALENDAR)


def test_the_table_says_where_each_number_is_from() -> None:
    for published in load_published_scores():
        assert published.source
        assert published.years[0] <= published.years[1]
        assert published.truth == "ERA5"
        for scores in published.rmse.values():
            assert list(scores) == sorted(scores)
            assert all(score > 0 for score in scores.values())
