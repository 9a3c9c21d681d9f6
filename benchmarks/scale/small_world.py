"""Config and data of a small run with as many samples as thousands of ranks need for a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr
import yaml

from credit.config import Config, load_config
from credit.grid import LatLonGrid

ROWS = 16
COLUMNS = 32
ATTRIBUTES = {"t2m": {"units": "K"}, "msl": {"units": "Pa"}}
_HOURS_PER_STEP = 6
# Number of times of the validation and the test period together, with the gaps between the splits.
_NUM_LATER_TIMES = 400


def build_grid() -> LatLonGrid:
    """Return the grid of the small run."""
    return LatLonGrid.equiangular(ROWS, COLUMNS, poles=False)


def write_small_run(folder: Path, num_samples: int, *overrides: str) -> Config:
    """Write data and config of a run into `folder`, and return the config.

    Args:
        folder: an existing folder.
        num_samples: smallest number of training samples.
        overrides: ``key=value`` of the config.
    """
    # 40 more samples, because a rollout needs later times.
    num_train_times = num_samples + 40
    times = np.datetime64("1950-01-01", "h") + _HOURS_PER_STEP * np.arange(num_train_times + _NUM_LATER_TIMES)
    _write_fields(folder / "data.nc", times)
    later_days = times[num_train_times:].astype("datetime64[D]")
    splits = {
        "train": [str(times[0]), str(times[num_train_times - 1].astype("datetime64[D]"))],
        "valid": [str(later_days[80]), str(later_days[180])],
        "test": [str(later_days[260]), str(later_days[-8])],
    }
    document = {
        "experiment": "scale",
        "save_loc": str(folder / "run"),
        "data": {
            "sources": [{"path": str(folder / "data.nc")}],
            "variables": {
                "prognostic": {"vars_2D": ["t2m", "msl"]},
                "static": {"vars_2D": ["sin_latitude"]},
            },
            "splits": splits,
            "timestep": f"{_HOURS_PER_STEP}h",
            "cache": "none",
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
        },
        "trainer": {"device": "cpu", "max_steps": 1, "train_batch_size": 1, "valid_batch_size": 1, "valid_samples": 32},
        "inference": {"lead_time": "24h", "initial_times": {"every": "24h"}, "batch_size": 1},
    }
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(document))
    return load_config(path, list(overrides))


def _write_fields(path: Path, times: np.ndarray) -> None:
    """Write two variables of plausible values at these times as netCDF."""
    grid = build_grid()
    wave_HW = np.cos(np.deg2rad(grid.lat))[:, None] * np.sin(np.deg2rad(3 * grid.lon))
    phase_T = np.cos(2 * np.pi * np.arange(len(times)) / 10)
    wave_THW = (phase_T[:, None, None] * wave_HW).astype(np.float32)
    dims = ("time", "latitude", "longitude")
    fields = {
        "t2m": (dims, 280 + 10 * wave_THW, ATTRIBUTES["t2m"]),
        "msl": (dims, 1e5 + 1e3 * wave_THW, ATTRIBUTES["msl"]),
    }
    coords = {
        "time": ("time", times.astype("datetime64[ns]")),
        "latitude": ("latitude", grid.lat, {"units": "degrees_north"}),
        "longitude": ("longitude", grid.lon, {"units": "degrees_east"}),
    }
    xr.Dataset(fields, coords).to_netcdf(path)
