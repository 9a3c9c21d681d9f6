"""A run on model levels scored on pressure levels: its files, and without files, by a second config."""

from __future__ import annotations

import shutil
from pathlib import Path

import netCDF4
import pytest
import xarray as xr
import yaml

from credit.cli.verify import load_run_config
from tests.smoke.test_budgets import write_air

DERIVE = {"z": {"kind": "geopotential"}, "msl": {"kind": "mean_sea_level_pressure"}, "wind": {"kind": "wind_speed"}}
TWO = "inference.initial_times=[2000-02-08, 2000-02-09]"


def write_scores_config(config: Path) -> Path:
    """Let the run write pressure levels and derived variables, and write a config whose data are those."""
    with netCDF4.Dataset(config.parent / "air.nc", "a") as file:
        for name, standard_name in {
            "sp": "surface_air_pressure",
            "zs": "surface_geopotential",
            "t": "air_temperature",
        }.items():
            file[name].standard_name = standard_name
    document = yaml.safe_load(config.read_text())
    document["inference"] |= {"lead_time": "18h", "pressure_levels": [850, 500], "derive": DERIVE}
    config.write_text(yaml.safe_dump(document))
    vertical = {"surface_pressure": "sp", "surface_geopotential": "zs"}
    source = {
        "path": str(config.parent / "air.nc"),
        "vertical": {**vertical, "coefficients": document["data"]["coefficients"]},
    }
    data = {key: document["data"][key] for key in ("splits", "split_gap", "valid_forecast_len")} | {
        "sources": [source],
        "levels": [850, 500],
        "variables": {"prognostic": {"vars_3D": ["t", "z", "wind"], "vars_2D": ["msl", "sp"]}},
        "variable_options": {name: {"derive": value["kind"]} for name, value in DERIVE.items()},
    }
    scores = {**{key: document[key] for key in ("save_loc", "model", "trainer", "verification")}, "data": data}
    scores["model"] = {key: value for key, value in document["model"].items() if key != "postprocess"}
    path = config.with_name("scores.yml")
    path.write_text(yaml.safe_dump(scores))
    return path


@pytest.mark.slow
def test_scores_of_files_are_those_without_files(tmp_path: Path, command) -> None:
    config = write_air(tmp_path)
    scores, run = write_scores_config(config), tmp_path / "run"
    assert command("train", config, "trainer.max_steps=1", "trainer.validate_every=1").returncode == 0
    assert command("rollout", config, TWO).returncode == 0
    done = command("verify", scores)
    assert done.returncode == 0, done.stderr
    of_files = (run / "scores.csv").read_bytes()
    with xr.open_dataset(run / "scores.nc") as table:
        assert {"z", "msl", "wind", "t"} <= {*table["variable"].values.tolist()}
    done = command("verify", scores, "--online", "--model", config, TWO)
    assert done.returncode == 0, done.stderr
    assert (run / "scores.csv").read_bytes() == of_files
    ensemble = "inference.ensemble={members: 2, lagged: 6h}"
    assert command("rollout", config, TWO, ensemble, "inference.folder=lagged").returncode == 0
    assert command("verify", scores, "inference.folder=lagged").returncode == 0
    of_files = (run / "scores.csv").read_bytes()
    # the run's folder has its config
    assert command("verify", scores, "--online", "--model", run, TWO, ensemble).returncode == 0
    assert (run / "scores.csv").read_bytes() == of_files
    moved = str(shutil.copytree(run, tmp_path / "moved"))
    assert load_run_config(moved, []).save_loc == moved
    done = command("verify", scores, "--model", config)
    assert done.returncode == 2 and "--model requires --online" in done.stderr
