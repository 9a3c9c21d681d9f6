"""Small data set on disk: netCDF files with travelling waves, and a config that trains on them in seconds."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import yaml

from credit.cli.main import main

ROWS = 16
COLUMNS = 32


def write_world(path: Path, first: str = "2000-01-01", times: int = 200, calendar: str = "standard", **changes) -> None:
    """Write a netCDF file with 6-hourly fields of a wave that travels eastward.

    Args:
        path: file to write.
        first: first time.
        times: number of times.
        calendar: calendar of the time coordinate.
        changes: variables to add; a variable of the same name is replaced.
    """
    latitudes = 90 - 180 / ROWS * (np.arange(ROWS) + 0.5)
    longitudes = np.arange(COLUMNS) * 360 / COLUMNS
    hours = 6.0 * np.arange(times)
    # Wavenumber 3, with a period of 60 h at a point.
    phase = np.deg2rad(3 * longitudes)[None, None, :] - 2 * np.pi * hours[:, None, None] / 60
    wave = np.cos(np.deg2rad(latitudes))[None, :, None] * np.sin(phase)
    noise = np.random.default_rng(5).normal(0, 0.02, wave.shape)
    z = 9.80665 * np.stack([1500 + 30 * (wave + noise), 5500 + 80 * (wave + noise)], axis=1).astype(np.float32)
    land = (np.cos(np.deg2rad(longitudes))[None, :] * np.ones(ROWS)[:, None] > 0.6).astype(np.float32)
    # The sea surface temperature is missing over land.
    sst = np.where(land[None] > 0.5, np.nan, 290 + 5 * wave).astype(np.float32)
    cells = ("latitude", "longitude")
    data = {
        "z": (("time", "level", *cells), z, {"units": "m2 s-2", "standard_name": "geopotential"}),
        "t2m": (("time", *cells), (280 + 10 * (wave + noise)).astype(np.float32), {"units": "K"}),
        "rain": (("time", *cells), np.maximum(wave, 0).astype(np.float32), {"units": "mm"}),
        "sst": (("time", *cells), sst, {"units": "K"}),
        "land": (cells, land, {"units": "1", "standard_name": "land_area_fraction"}),
        **changes,
    }
    coords = {
        "time": ("time", hours, {"units": f"hours since {first}", "calendar": calendar, "standard_name": "time"}),
        "level": ("level", [850.0, 500.0], {"units": "hPa", "positive": "down"}),
        "latitude": ("latitude", latitudes, {"units": "degrees_north"}),
        "longitude": ("longitude", longitudes, {"units": "degrees_east"}),
    }
    xr.Dataset(data, coords).to_netcdf(path)


def write_extra_variable(data: Path, path: Path) -> None:
    """Write a file with two more variables: ``cloud`` at the times of `data`, and ``height`` without a time axis.

    Args:
        data: file of `write_world`.
        path: file to write.
    """
    with xr.open_dataset(data) as world_fields:
        cloud = (world_fields["t2m"] - 270.0) / 20.0
        cloud.attrs = {"units": "1", "standard_name": "cloud_area_fraction"}
        height = 500.0 * world_fields["land"]
        height.attrs = {"units": "m", "standard_name": "surface_altitude"}
        xr.Dataset({"cloud": cloud, "height": height}).to_netcdf(path)


CONFIG = {
    "experiment": "small",
    "data": {
        "levels": [850, 500],
        "variables": {
            "prognostic": {"vars_3D": ["z"], "vars_2D": ["t2m"]},
            "diagnostic": {"vars_2D": ["rain"]},
            "dynamic_forcing": {"vars_2D": ["sst", "toa_incident_solar_radiation"]},
            "static": {"vars_2D": ["land", "sin_latitude"]},
        },
        "variable_options": {"sst": {"missing": "fill_mean"}, "rain": {"minimum": 0}},
        "transforms": {"rain": {"kind": "log1p", "unit": 0.2}},
        "splits": {
            "train": ["2000-01-01", "2000-01-28"],
            "valid": ["2000-02-01", "2000-02-06"],
            "test": ["2000-02-08", "2000-02-19"],
        },
        "split_gap": "1d",
        "valid_forecast_len": 2,
    },
    "model": {
        "type": "wxformer",
        "dim": [8, 16, 32, 64],
        "depth": [1, 1, 1, 1],
        "dim_head": 8,
        "global_window_size": [4, 2, 1, 1],
        "local_window_size": [4, 2, 1, 1],
        "cross_embed_kernel_sizes": [[2, 4], [2, 4], [2, 4], [2, 4]],
        "padding": {"lat": [8, 8], "lon": [8, 8]},
        "attn_dropout": 0.1,
    },
    "trainer": {
        "device": "cpu",
        "max_steps": 40,
        "train_batch_size": 4,
        "valid_batch_size": 8,
        "valid_samples": 8,
        "learning_rate": 2e-3,
        "ema_decay": 0.9,
        "validate_every": 20,
        "checkpoint_every": 10,
        "log_every": 5,
    },
    "inference": {"lead_time": "48h", "initial_times": {"every": "24h"}, "batch_size": 4},
    # Drawing figures takes ten times as long as scoring. Tests of figures switch it on.
    "verification": {"climatology": {"harmonics": 0}, "figure_leads": ["24h", "48h"], "draw_figures": False},
}


def world(folder: Path) -> Path:
    """Write data.nc and config.yml into `folder` and return it."""
    write_world(folder / "data.nc")
    document = {**CONFIG, "save_loc": str(folder / "run")}
    document["data"] = {**document["data"], "sources": [{"path": str(folder / "data.nc")}]}
    (folder / "config.yml").write_text(yaml.safe_dump(document))
    return folder


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    """Folder with data.nc and config.yml."""
    return world(tmp_path)


@pytest.fixture
def command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Callable[..., subprocess.CompletedProcess]:
    """Function that runs ``credit NAME arguments`` in a temporary folder and returns the completed process.

    The command runs in this process, because a new Python process takes 5 s to start. The log messages are in the
    result's stderr. test_wheel and tests that kill a run start processes of their own.
    """
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)

    def run_command(*arguments: object) -> subprocess.CompletedProcess:
        # Forget the output of earlier commands.
        caplog.clear()
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit_request:
            status = exit_request.code or 0
        output, errors = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, output, caplog.text + errors)

    return run_command
