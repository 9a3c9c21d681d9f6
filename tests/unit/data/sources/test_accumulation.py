"""Tests of means and sums over the time step, from values over the step, shorter intervals, or since forecast start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from credit.data.sources.source_reader import SourceReader, open_sources
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config, write_file

ROWS = 4
COLUMNS = 8
HOURS = 60
# Sum over each hour; the first hour ends at 2000-01-01T01:00.
RATES = np.random.default_rng(1).gamma(0.5, 1.0, (HOURS, ROWS, COLUMNS))


def sum_hours(first: int, last: int) -> np.ndarray:
    """Return the sum over the hours from `first` to `last`."""
    return RATES[first:last].sum(axis=0)


def open_precipitation(path: Path, temporal: str, timestep: str = "6h", **options: object) -> SourceReader:
    fields = {"tp": {"temporal": temporal, **options}}
    return open_sources(make_config(path, p2=["tp"], variable_options=fields, timestep=timestep))


def require_totals(reader: SourceReader, hours: int, ends: list[int], share: float = 1.0) -> None:
    """Require values at the hours `ends`, equal to `share` times the sum over `hours` hours."""
    start = reader.calendar.parse("2000-01-01")
    assert ((reader.times - start) / 60).tolist() == ends
    for index, end in enumerate(ends):
        np.testing.assert_allclose(reader.read(index)[0], share * sum_hours(end - hours, end), rtol=1e-5, atol=1e-6)


def test_values_over_the_step_are_unchanged(tmp_path: Path) -> None:
    ends = np.arange(6, HOURS + 1, 6)
    sums = np.stack([sum_hours(end - 6, end) for end in ends]).astype(np.float32)
    path = write_file(tmp_path / "a.nc", {"tp": sums}, hours=ends, time_bounds=np.stack([ends - 6, ends], axis=1))
    reader = open_precipitation(path, "accumulate")
    np.testing.assert_array_equal(reader.read(3)[0], sums[3])
    assert reader.attributes["tp"]["temporal"] == "accumulate"


@pytest.mark.parametrize("bounds", [False, True])
@pytest.mark.parametrize(("temporal", "share"), [("accumulate", 1.0), ("mean", 1 / 6)])
def test_hourly_values_are_aggregated(tmp_path: Path, bounds: bool, temporal: str, share: float) -> None:
    """ERA5 has one value per hour."""
    ends = np.arange(1, HOURS + 1)
    time_bounds = np.stack([ends - 1, ends], axis=1) if bounds else None
    path = write_file(tmp_path / "a.nc", {"tp": RATES.astype(np.float32)}, hours=ends, time_bounds=time_bounds)
    require_totals(open_precipitation(path, temporal), 6, list(range(6, HOURS + 1)), share)


def test_missing_hour_affects_only_its_windows(tmp_path: Path) -> None:
    ends = np.delete(np.arange(1, HOURS + 1), 19)
    path = write_file(tmp_path / "a.nc", {"tp": np.delete(RATES, 19, axis=0).astype(np.float32)}, hours=ends)
    require_totals(
        open_precipitation(path, "accumulate"), 6, [end for end in range(6, HOURS + 1) if not 20 <= end <= 25]
    )


@pytest.mark.parametrize("bounds", [False, True])
@pytest.mark.parametrize("timestep", [3, 6, 12, 24])
def test_values_since_forecast_start_are_deaccumulated(tmp_path: Path, bounds: bool, timestep: int) -> None:
    """ERA-Interim has forecasts from 00 and 12 UTC with a value every three hours."""
    ends = np.arange(3, HOURS + 1, 3)
    starts = (ends - 1) // 12 * 12
    sums = np.stack([sum_hours(start, end) for start, end in zip(starts, ends, strict=True)]).astype(np.float32)
    time_bounds = np.stack([starts, ends], axis=1) if bounds else None
    path = write_file(tmp_path / "a.nc", {"tp": sums}, hours=ends, time_bounds=time_bounds)
    options = {} if bounds else {"restarts": [0, 12]}
    reader = open_precipitation(path, "deaccumulate", f"{timestep}h", **options)
    require_totals(reader, timestep, list(range(timestep, HOURS + 1, 3)))
    assert reader.attributes["tp"]["temporal"] == "accumulate"


def test_zero_at_forecast_start_is_not_a_sum(tmp_path: Path) -> None:
    ends = np.array([0, 6, 12, 18])
    sums = np.stack([sum_hours(0, end) for end in ends]).astype(np.float32)
    path = write_file(tmp_path / "a.nc", {"tp": sums}, hours=ends, time_bounds=np.stack([0 * ends, ends], axis=1))
    require_totals(open_precipitation(path, "deaccumulate"), 6, [6, 12, 18])


def test_intervals_that_do_not_form_a_step_are_refused(tmp_path: Path) -> None:
    fields = {"tp": RATES[:4].astype(np.float32)}
    ends = np.array([0, 6, 12, 18])
    path = write_file(tmp_path / "a.nc", fields, hours=[0, 4, 8, 12])
    with pytest.raises(
        DataError, match="a.nc: data.variable_options.tp.temporal is accumulate, .* 6h, but each value covers 4h"
    ):
        open_precipitation(path, "accumulate")
    path = write_file(tmp_path / "b.nc", fields, time_bounds=np.stack([0 * ends, ends], axis=1))
    with pytest.raises(DataError, match="intervals of .* and 6h; .* set temporal: deaccumulate"):
        open_precipitation(path, "accumulate")
    path = write_file(tmp_path / "c.nc", fields, time_bounds=np.stack([ends - 3, ends + 3], axis=1))
    with pytest.raises(DataError, match="at 2000-01-01T00:00 covers 1999-12-31T21:00 to 2000-01-01T03:00"):
        open_precipitation(path, "mean")
    path = write_file(tmp_path / "d.nc", fields)
    with pytest.raises(
        DataError, match=r"neither time bounds nor data.variable_options.tp.restarts .* such as \[0, 12\]"
    ):
        open_precipitation(path, "deaccumulate")
    path = write_file(tmp_path / "e.nc", fields, hours=[0, 1, 2, 3])
    with pytest.raises(DataError, match="tp has 4 times, which do not add up to a complete window"):
        open_precipitation(path, "accumulate")
    with pytest.raises(ValueError, match="restarts has no effect"):
        open_precipitation(path, "accumulate", restarts=[0])
