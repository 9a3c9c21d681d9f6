"""Rollouts of several initial times of which one has an invalid analysis."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from tests.smoke.conftest import write_world


def test_bad_analysis_stops_only_the_process_that_reads_it(small_run: Path, command) -> None:
    """Each process reads and checks only the analyses of its own forecasts.

    The first process warns about its unusual analysis. Only the second process fails at the missing value.
    """
    config = small_run / "config.yml"
    assert command("train", config, "trainer.max_steps=2", "trainer.validate_every=2").returncode == 0
    with xr.open_dataset(small_run / "data.nc") as data:
        t2m, times = data["t2m"].values, data["time"].values
    t2m[times == np.datetime64("2000-02-10")] += 90
    t2m[times == np.datetime64("2000-02-12"), 3, 5] = np.nan
    write_world(small_run / "new.nc", t2m=(("time", "latitude", "longitude"), t2m, {"units": "K"}))
    initial_options = (
        f"data.sources=[{{path: {small_run / 'new.nc'}}}]", "inference.initial_times=[2000-02-10, 2000-02-12]",
        "inference.batch_size=1",
    )  # fmt: skip
    first_part = command("rollout", config, *initial_options, "--part=1/2")
    assert first_part.returncode == 0, first_part.stderr
    assert "the fields of 2000-02-10T00:00 differ from the training fields" in first_part.stderr
    second_part = command("rollout", config, *initial_options, "--part=2/2")
    assert (
        second_part.returncode == 2 and "2000-02-12T00:00" in second_part.stderr and "unlike" not in second_part.stderr
    )
    repeated_part = command("rollout", config, *initial_options, "--part=1/2")
    assert repeated_part.returncode == 0 and "unlike" not in repeated_part.stderr, "nothing is forecast"
