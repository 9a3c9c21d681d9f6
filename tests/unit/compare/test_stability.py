"""Tests of the variability of long forecasts, on fields with known standard deviations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from credit.compare import stability
from credit.compare.stability import (
    StabilityCurve,
    compute_deviations,
    compute_spatial_deviation,
    measure_long_run,
    require_valid_long_run_length,
)
from credit.errors import ConfigError
from credit.grid import LatLonGrid
from tests.unit.compare.configs import make_run

GRID = LatLonGrid.equiangular(91, 180, poles=True)


def test_the_deviation_is_weighted_by_area_and_leaves_missing_cells_out() -> None:
    sine = np.sin(np.deg2rad(GRID.lat))[:, None] * np.ones(180)
    # The variance of the sine of latitude over the sphere is 1/3.
    masked = np.where(np.deg2rad(GRID.lat)[:, None] * np.ones(180) < 0, np.nan, 3.0)
    deviations = compute_spatial_deviation(np.stack([5 + 2 * sine, masked]).astype(np.float32), GRID)
    assert deviations[0] == pytest.approx(2 / np.sqrt(3), rel=1e-3)
    assert deviations[1] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("ratios", "exit_day", "nonfinite_day"),
    [
        ([1.0, 2.0, 0.5], None, None),
        ([1.0, 2.1, np.nan], 2.0, 3.0),
        ([1.0, np.nan, 1.0], 2.0, 2.0),
        ([0.4, 1.0, 1.0], 1.0, None),
    ],
)
def test_exit_day_and_nonfinite_day_of_a_curve(
    ratios: list[float], exit_day: float | None, nonfinite_day: float | None
) -> None:
    curve = StabilityCurve("a", "seed_1", "z500", "field", [1.0, 2.0, 3.0], ratios)
    assert (curve.exit_day, curve.nonfinite_day) == (exit_day, nonfinite_day)


def test_eddies_are_deviations_from_the_zonal_mean() -> None:
    # The variance of cos(latitude) sin(longitude) over the sphere is 1/3, and its mean along each row is 0.
    wave = np.cos(np.deg2rad(GRID.lat))[:, None] * np.sin(np.deg2rad(GRID.lon))
    zonal = np.sin(np.deg2rad(GRID.lat))[:, None] * np.ones(180)
    field, eddies = compute_deviations(np.stack([3 * zonal + wave, 3 * zonal]), GRID)
    assert field == pytest.approx([np.sqrt(10 / 3), np.sqrt(3)], rel=1e-3)
    assert eddies == pytest.approx([np.sqrt(1 / 3), 0], rel=1e-3, abs=1e-6)


def test_days_of_a_long_forecast_with_vanishing_eddies_and_a_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    wave = np.cos(np.deg2rad(GRID.lat))[:, None] * np.sin(np.deg2rad(GRID.lon))
    zonal = 3 * np.sin(np.deg2rad(GRID.lat))[:, None] * np.ones(180)
    zonal[:10] = np.nan
    factors = [1.0, 0.8, 0.2, 0.2]

    def read_members(initial_minutes: int, lead_index: int) -> np.ndarray:
        field = zonal + factors[lead_index] * wave
        if lead_index == 3:
            field[50, 50] = np.nan
        # The second member must not be used.
        return np.stack([np.stack([0 * zonal, field]), np.full((2, *field.shape), 1e9)])

    archive = SimpleNamespace(
        initial_minutes=np.array([0]), lead_minutes=1440 * np.arange(1, 5), channel_names=["msl", "z500"],
        grid=GRID, read_members=read_members,
    )  # fmt: skip
    monkeypatch.setattr(stability, "open_forecasts", lambda folder: archive)
    deviations = compute_deviations((zonal + wave)[None], GRID)[:, 0]
    truth = {("field", "z500"): deviations[0], ("field", "q700"): 1.0}
    truth |= {("eddies", "z500"): deviations[1], ("eddies", "q700"): 1.0}
    field, eddies = measure_long_run("a", "seed_1", Path("x"), truth)
    assert (field.channel, field.measure, eddies.measure) == ("z500", "field", "eddies")
    assert field.days == [1.0, 2.0, 3.0, 4.0]
    assert eddies.ratios[:3] == pytest.approx([1.0, 0.8, 0.2])
    assert (field.exit_day, field.nonfinite_day) == (4.0, 4.0)
    assert (eddies.exit_day, eddies.nonfinite_day) == (3.0, 4.0)


def test_the_length_must_be_a_multiple_of_the_step() -> None:
    config = make_run("a").config
    require_valid_long_run_length("60d", config)
    with pytest.raises(ConfigError, match="--long-run 7h: must be a multiple of data.timestep 6h"):
        require_valid_long_run_length("7h", config)
