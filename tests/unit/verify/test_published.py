"""Published scores stand beside a table only where grid, years and truth are the same."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from credit.verify.published import comparable, published_scores, rows_of
from credit.verify.table import ScoreTable


def table(first: str = "2017-01-01T00:00", last: str = "2018-12-31T12:00", truth: str = "era5/*.nc") -> ScoreTable:
    """A table with a z500 of 500 at 3 and 5 days."""
    dims = ("forecast", "season", "channel", "lead", "region")
    coords = {
        "forecast": ["model"], "season": ["all"], "channel": ["z500", "t850"], "lead": [72.0, 120.0],
        "region": ["global"], "units": ("channel", ["m2 s-2", "degC"]),
    }  # fmt: skip
    data = {"rmse": (dims, np.full((1, 1, 2, 2, 1), 500.0))}
    return ScoreTable(xr.Dataset(data, coords, {"first_case": first, "last_case": last, "truth": truth}))


def test_the_same_grid_years_and_truth() -> None:
    found = comparable(table(), 5.625)
    assert {own.system for own in found} == {"IFS operational", "IFS T63", "ResNet (Rasp and Thuerey)", "persistence"}
    rows = rows_of(found, table())
    assert ("IFS T63", "z500", 120, 463, 500.0, "README of github.com/pangeo-data/WeatherBench") in rows
    assert {row[1] for row in rows} == {"z500"}, "temperature in other units is left out"


@pytest.mark.parametrize(
    ("own", "degrees"),
    [
        (table(), 1.0),
        (table(first="2018-01-01T00:00"), 5.625),
        (table(last="2019-01-02T00:00"), 5.625),
        (table(truth="own/analysis.nc"), 5.625),
    ],
)
def test_unlike_numbers_do_not_stand_side_by_side(own: ScoreTable, degrees: float) -> None:
    assert comparable(own, degrees) == []


def test_the_table_says_where_each_number_is_from() -> None:
    for own in published_scores():
        assert own.source and own.years[0] <= own.years[1] and own.truth == "ERA5"
        for scores in own.rmse.values():
            assert list(scores) == sorted(scores) and all(score > 0 for score in scores.values())
