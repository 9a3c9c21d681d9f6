"""Forecasts beside an analysis that no forecast can start from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from tests.smoke.conftest import write_world


def test_other_analyses_are_forecast_from(small_run: Path, command) -> None:
    """What a process does not forecast from does not stop it, nor is it what its warning is of."""
    config = small_run / "config.yml"
    assert command("train", config, "trainer.max_steps=2", "trainer.validate_every=2").returncode == 0
    with xr.open_dataset(small_run / "data.nc") as data:
        t2m, times = data["t2m"].values, data["time"].values
    t2m[times == np.datetime64("2000-02-10")] += 90
    t2m[times == np.datetime64("2000-02-12"), 3, 5] = np.nan
    write_world(small_run / "new.nc", t2m=(("time", "latitude", "longitude"), t2m, {"units": "K"}))
    starts = (
        f"data.sources=[{{path: {small_run / 'new.nc'}}}]", "inference.initial_times=[2000-02-10, 2000-02-12]",
        "inference.batch_size=1",
    )  # fmt: skip
    first = command("rollout", config, *starts, "--part=1/2")
    assert first.returncode == 0, first.stderr
    assert "the fields of 2000-02-10T00:00 differ from the training fields" in first.stderr
    second = command("rollout", config, *starts, "--part=2/2")
    assert second.returncode == 2 and "2000-02-12T00:00" in second.stderr and "unlike" not in second.stderr
    again = command("rollout", config, *starts, "--part=1/2")
    assert again.returncode == 0 and "unlike" not in again.stderr, "nothing is forecast"
