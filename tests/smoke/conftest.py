"""A small world on disk: netCDF files of travelling waves and a config that trains on them in seconds."""

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

ROWS, COLUMNS = 16, 32


def write_world(path: Path, first: str = "2000-01-01", times: int = 200, calendar: str = "standard", **changes) -> None:
    """Write one file; `changes` replaces arrays by name."""
    lat = 90 - 180 / ROWS * (np.arange(ROWS) + 0.5)
    lon = np.arange(COLUMNS) * 360 / COLUMNS
    hours = 6.0 * np.arange(times)
    wave = np.cos(np.deg2rad(lat))[None, :, None] * np.sin(
        np.deg2rad(3 * lon)[None, None, :] - 2 * np.pi * hours[:, None, None] / 60
    )
    noise = np.random.default_rng(5).normal(0, 0.02, wave.shape)
    z = 9.80665 * np.stack([1500 + 30 * (wave + noise), 5500 + 80 * (wave + noise)], axis=1).astype(np.float32)
    land = (np.cos(np.deg2rad(lon))[None, :] * np.ones(ROWS)[:, None] > 0.6).astype(np.float32)
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
        "latitude": ("latitude", lat, {"units": "degrees_north"}),
        "longitude": ("longitude", lon, {"units": "degrees_east"}),
    }
    xr.Dataset(data, coords).to_netcdf(path)


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
    "verification": {"climatology": {"harmonics": 0}, "figure_leads": ["24h", "48h"]},
}


def world(folder: Path) -> Path:
    """Write data.nc and config.yml into `folder` and return it."""
    write_world(folder / "data.nc")
    raw = {**CONFIG, "save_loc": str(folder / "run")}
    raw["data"] = {**raw["data"], "sources": [{"path": str(folder / "data.nc")}]}
    (folder / "config.yml").write_text(yaml.safe_dump(raw))
    return folder


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    """A folder with data.nc and config.yml."""
    return world(tmp_path)


@pytest.fixture
def command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Callable[..., subprocess.CompletedProcess]:
    """Runs ``credit NAME arguments`` in an empty folder and in this process, as a new one takes 5 s to start.

    What is logged counts as stderr. test_wheel and tests that kill start processes.
    """
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)

    def run(*arguments: object) -> subprocess.CompletedProcess:
        caplog.clear()
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, caplog.text + err)

    return run
