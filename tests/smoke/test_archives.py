"""Sources whose grid and units differ from those of the run, through preprocessing, training, forecasts and scores."""

from __future__ import annotations

from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr

GRID = ("data.grid={rows: 16, columns: 16, poles: true}", "data.regrid=conservative")
FIELDS = "data.variable_options={sst: {missing: fill_mean}, rain: {minimum: 0}, t2m: {units: K}}"


@pytest.mark.slow
def test_forecasts_and_scores_carry_the_runs_grid_and_units(small_run: Path, command) -> None:
    """The file is in Celsius on 16 x 32 cells without poles; the run is in Kelvin on 16 x 16 cells with poles."""
    with netCDF4.Dataset(small_run / "data.nc", "a") as file:
        file["t2m"][:] = file["t2m"][:] - 273.15
        file["t2m"].units = "degC"
    config = small_run / "config.yml"
    options = (*GRID, FIELDS, f"data.store={small_run}/store.zarr", "trainer.max_steps=2")
    for name in ("preprocess", "check", "train", "rollout", "verify"):
        result = command(name, config, *options)
        assert result.returncode == 0, f"{name}: {result.stdout}{result.stderr}"
    path = min((small_run / "run" / "forecasts").glob("*.nc"))
    with xr.open_dataset(path) as forecast:
        assert forecast["t2m"].attrs["units"] == "K" and forecast["t2m"].shape[-2:] == (16, 16)
        # After two training steps, a forecast stays near its initial state of about 280 K.
        assert 270 < float(forecast["t2m"].mean()) < 290
        np.testing.assert_allclose(forecast["latitude"], 90.0 - 12.0 * np.arange(16))
    table_rows = [line.split(",") for line in (small_run / "run" / "scores.csv").read_text().splitlines()]
    metric_units = {tuple(row[7:10:2]) for row in table_rows if row[1] == "t2m" and row[7] == "rmse"}
    assert metric_units == {("rmse", "K")}
    result = command("rollout", config, *GRID)
    assert result.returncode == 2 and "t2m: the data are in degC" in result.stderr
