"""Variability of long forecasts on fields whose standard deviation is known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from credit.compare import stability
from credit.compare.stability import StabilityCurve, measure_long_run, require_long_run, spatial_deviation
from credit.errors import ConfigError
from credit.grid import LatLonGrid
from tests.unit.compare.configs import make_run

GRID = LatLonGrid.equiangular(91, 180, poles=True)


def test_the_deviation_is_weighted_by_area_and_leaves_missing_cells_out() -> None:
    sine = np.sin(np.deg2rad(GRID.lat))[:, None] * np.ones(180)
    # The variance of the sine of latitude over the sphere is 1/3.
    masked = np.where(np.deg2rad(GRID.lat)[:, None] * np.ones(180) < 0, np.nan, 3.0)
    deviations = spatial_deviation(np.stack([5 + 2 * sine, masked]).astype(np.float32), GRID)
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
def test_days(ratios: list[float], exit_day: float | None, nonfinite_day: float | None) -> None:
    curve = StabilityCurve("a", "seed_1", "z500", [1.0, 2.0, 3.0], ratios)
    assert (curve.exit_day, curve.nonfinite_day) == (exit_day, nonfinite_day)


def test_a_long_forecast_that_grows_and_becomes_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    sine = np.sin(np.deg2rad(GRID.lat))[:, None] * np.ones(180)
    sine[:10] = np.nan
    factors = [1.0, 1.5, 4.0, 4.0]

    def read_members(initial_minutes: int, lead_index: int) -> np.ndarray:
        field = factors[lead_index] * sine
        if lead_index == 3:
            field[50, 50] = np.nan
        # The second member must not be used.
        return np.stack([np.stack([0 * sine, field]), np.full((2, *sine.shape), 1e9)])

    archive = SimpleNamespace(
        initial_minutes=np.array([0]), lead_minutes=1440 * np.arange(1, 5), channel_names=["msl", "z500"],
        grid=GRID, read_members=read_members,
    )  # fmt: skip
    monkeypatch.setattr(stability, "open_forecasts", lambda folder: archive)
    truth = {"z500": float(spatial_deviation(sine[None], GRID)[0]), "q700": 1.0}
    [curve] = measure_long_run("a", "seed_1", Path("x"), truth)
    assert curve.channel == "z500" and curve.days == [1.0, 2.0, 3.0, 4.0]
    assert curve.ratios[:3] == pytest.approx([1.0, 1.5, 4.0])
    assert (curve.exit_day, curve.nonfinite_day) == (3.0, 4.0)


def test_the_length_must_be_a_multiple_of_the_step() -> None:
    config = make_run("a").config
    require_long_run("60d", config)
    with pytest.raises(ConfigError, match="--long-run 7h: must be a multiple of data.timestep 6h"):
        require_long_run("7h", config)
