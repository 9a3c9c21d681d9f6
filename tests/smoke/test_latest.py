"""Forecasts from the newest analysis (`credit rollout --latest`): GFS fields in netCDF and GRIB, and few variables."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.cli.main import main

CONFIG = Path(__file__).parents[2] / "config" / "gfs_wind_1deg.yml"


def write_grib(path: Path, analyses: xr.Dataset) -> None:
    """Write 10 m winds in the layout of GFS: GRIB 2, rows from north to south, columns from longitude 0."""
    eccodes = pytest.importorskip("eccodes")
    analyses = analyses.assign_coords(longitude=analyses["longitude"] % 360).sortby("longitude")
    analyses = analyses.sortby("latitude", ascending=False)
    grid = {
        "Ni": 360, "Nj": 181, "iDirectionIncrementInDegrees": 1.0, "jDirectionIncrementInDegrees": 1.0,
        "latitudeOfFirstGridPointInDegrees": 90.0, "latitudeOfLastGridPointInDegrees": -90.0,
        "longitudeOfFirstGridPointInDegrees": 0.0, "longitudeOfLastGridPointInDegrees": 359.0,
    }  # fmt: skip
    with open(path, "wb") as file:
        for time in analyses["time"].values:
            day, hour = str(time)[:10].replace("-", ""), int(str(time)[11:13])
            for name, short in (("u10", "10u"), ("v10", "10v")):
                message = eccodes.codes_grib_new_from_samples("regular_ll_sfc_grib2")
                keys = {"centre": "kwbc", **grid, "dataDate": int(day), "dataTime": 100 * hour, "shortName": short}
                for key, value in {**keys, "bitsPerValue": 24}.items():
                    eccodes.codes_set(message, key, value)
                eccodes.codes_set_values(message, analyses[name].sel(time=time).values.astype(float).ravel())
                eccodes.codes_write(message, file)
                eccodes.codes_release(message)


@pytest.mark.slow
def test_forecasts_from_grib_and_netcdf_are_equal(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data have two analyses. The forecast starts from the later one, after which there are no data."""
    monkeypatch.setenv("GFS_WIND", str(shared_data / "gfs_wind10m"))
    run = [str(CONFIG), f"save_loc={tmp_path / 'run'}"]
    assert main(["train", *run, "trainer.max_steps=1", "trainer.validate_every=1", "trainer.valid_samples=1"]) == 0
    (path,) = (shared_data / "gfs_wind10m").glob("*.nc")
    with xr.open_dataset(path) as analyses:
        last = analyses.isel(time=slice(-2, None)).load().drop_encoding()
    last.to_netcdf(tmp_path / "new.nc")
    write_grib(tmp_path / "new.grib2", last)
    speed = "{kind: wind_speed, inputs: {eastward_wind: u10, northward_wind: v10}}"
    opened_forecasts = {}
    for kind in ("nc", "grib2"):
        sources = f"data.sources=[{{path: {tmp_path / 'new.'}{kind}}}]"
        options = [f"inference.folder={kind}", "inference.lead_time=12h", f"inference.derive={{si10: {speed}}}"]
        assert main(["rollout", *run, "--latest", sources, *options]) == 0
        (path,) = (tmp_path / "run" / kind).iterdir()
        assert path.name == "forecast_2026-08-22T12.nc"
        with xr.open_dataset(path) as forecast:
            opened_forecasts[kind] = forecast.load()
    np.testing.assert_allclose(
        opened_forecasts["nc"]["si10"],
        np.hypot(opened_forecasts["nc"]["u10"], opened_forecasts["nc"]["v10"]),
        rtol=1e-5,
    )
    for name in ("u10", "v10"):
        np.testing.assert_allclose(opened_forecasts["grib2"][name], opened_forecasts["nc"][name], atol=1e-4)
        assert opened_forecasts["nc"][name].shape == (2, 181, 360) and 3 < float(opened_forecasts["nc"][name].std()) < 8


@pytest.mark.slow
@pytest.mark.parametrize("has_store", [False, True])
def test_analysis_needs_only_prognostic_variables_and_forcing(
    small_run: Path, command: Callable[..., subprocess.CompletedProcess], has_store: bool
) -> None:
    """A forecast reads only prognostic variables and forcing: no diagnostics, static fields or training store.

    Static fields come from the checkpoint. If those of the data differ, a warning names them.
    """
    config = small_run / "config.yml"
    stored = [f"data.store={small_run / 'store.zarr'}"] if has_store else []
    if has_store:
        assert command("preprocess", config, *stored).returncode == 0
    trained = command("train", config, *stored, "trainer.max_steps=1", "trainer.validate_every=1")
    assert trained.returncode == 0, trained.stderr
    with xr.open_dataset(small_run / "data.nc") as data:
        last = data.isel(time=[-1]).load().drop_encoding()
    last.to_netcdf(small_run / "whole.nc")
    last[["z", "t2m", "sst"]].to_netcdf(small_run / "inputs.nc")
    last[["z", "t2m", "sst", "land"]].assign(land=1 - last["land"]).to_netcdf(small_run / "moved.nc")
    forecasts = {}
    for name in ("whole", "inputs", "moved"):
        sources = f"data.sources=[{{path: {small_run / name}.nc}}]"
        result = command("rollout", config, *stored, "--latest", sources, f"inference.folder={name}")
        assert result.returncode == 0, result.stderr
        assert (
            "land (by up to 1): the static fields of the data differ from the static fields in training"
            in result.stderr
        ) == (name == "moved")
        (path,) = (small_run / "run" / name).iterdir()
        assert path.name == "forecast_2000-02-19T18.nc"
        forecasts[name] = path.read_bytes()
    assert forecasts["inputs"] == forecasts["whole"] == forecasts["moved"]
    # A given initial time is read in the same way. The initial times of a test period need data for all lead times.
    options = "inference.initial_times=[2000-02-19T18]", f"data.sources=[{{path: {small_run / 'inputs.nc'}}}]"
    result = command("rollout", config, *stored, *options, "inference.folder=named")
    assert result.returncode == 0, result.stderr
    assert (small_run / "run" / "named" / "forecast_2000-02-19T18.nc").read_bytes() == forecasts["whole"]
    assert command("rollout", config, *stored, options[1], "inference.folder=scored").returncode == 2
    # Forcing is an input, so it is required.
    last[["z", "t2m"]].to_netcdf(small_run / "too_little.nc")
    result = command("rollout", config, *stored, "--latest", f"data.sources=[{{path: {small_run / 'too_little.nc'}}}]")
    assert result.returncode == 2 and 'data.variables: "sst" is in no file of data.sources' in result.stderr
    assert "rain" not in result.stderr and "land" not in result.stderr
