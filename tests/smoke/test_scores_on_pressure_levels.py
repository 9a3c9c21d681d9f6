"""Scores on pressure levels of a run on model levels, by a second config, with and without forecast files."""

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
TWO_INITIAL_TIMES = "inference.initial_times=[2000-02-08, 2000-02-09]"


def write_scores_config(config: Path) -> Path:
    """Add pressure levels and derived variables to the run's output, and write a config that scores them.

    Returns:
        Path of the config that scores.
    """
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
    scores_config = {**{key: document[key] for key in ("save_loc", "model", "trainer", "verification")}, "data": data}
    scores_config["model"] = {key: value for key, value in document["model"].items() if key != "postprocess"}
    path = config.with_name("scores.yml")
    path.write_text(yaml.safe_dump(scores_config))
    return path


@pytest.mark.slow
def test_scores_of_files_equal_online_scores(tmp_path: Path, command) -> None:
    config = write_air(tmp_path)
    scores_config, run = write_scores_config(config), tmp_path / "run"
    assert command("train", config, "trainer.max_steps=1", "trainer.validate_every=1").returncode == 0
    assert command("rollout", config, TWO_INITIAL_TIMES).returncode == 0
    result = command("verify", scores_config)
    assert result.returncode == 0, result.stderr
    scores_of_files = (run / "scores.csv").read_bytes()
    with xr.open_dataset(run / "scores.nc") as table:
        assert {"z", "msl", "wind", "t"} <= {*table["variable"].values.tolist()}
    result = command("verify", scores_config, "--online", "--model", config, TWO_INITIAL_TIMES)
    assert result.returncode == 0, result.stderr
    assert (run / "scores.csv").read_bytes() == scores_of_files
    ensemble = "inference.ensemble={members: 2, lagged: 6h}"
    assert command("rollout", config, TWO_INITIAL_TIMES, ensemble, "inference.folder=lagged").returncode == 0
    assert command("verify", scores_config, "inference.folder=lagged").returncode == 0
    scores_of_files = (run / "scores.csv").read_bytes()
    # --model also accepts the folder of the run, which contains its config.
    assert command("verify", scores_config, "--online", "--model", run, TWO_INITIAL_TIMES, ensemble).returncode == 0
    assert (run / "scores.csv").read_bytes() == scores_of_files
    moved_run = str(shutil.copytree(run, tmp_path / "moved"))
    assert load_run_config(moved_run, []).save_loc == moved_run
    result = command("verify", scores_config, "--model", config)
    assert result.returncode == 2 and "--model requires --online" in result.stderr
