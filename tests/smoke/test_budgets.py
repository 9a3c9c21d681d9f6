"""Budgets by the public commands: checked, trained with, continued, forecast for ten days, closed in the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import yaml

from tests.smoke.conftest import CONFIG
from tests.unit.forecast.air import FLUXES, POST, UNITS, H, K, W, raw_config, totals
from tests.unit.forecast.air import fields as atmosphere

TIMES = 200


def write_air(folder: Path) -> Path:
    """Write an atmosphere whose anomalies travel eastward, and return the config of a run on it."""
    raw = raw_config(folder)
    raw["data"] |= {"sources": [{"path": str(folder / "air.nc")}], "splits": CONFIG["data"]["splits"]}
    raw["data"] |= {"split_gap": "1d", "valid_forecast_len": 2}
    raw["model"] = {**CONFIG["model"], "postprocess": POST}
    raw |= {
        "trainer": CONFIG["trainer"] | {"max_steps": 6, "validate_every": 3, "checkpoint_every": 3},
        "inference": {"lead_time": "240h", "initial_times": ["2000-02-08", "2000-02-09"]},
        "verification": CONFIG["verification"],
    }
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(raw))

    from credit.config import load_config

    air = atmosphere(load_config(path))
    lat = 90 - 180 / H * (np.arange(H) + 0.5)
    coords = {
        "time": ("time", 6.0 * np.arange(TIMES), {"units": "hours since 2000-01-01", "standard_name": "time"}),
        "level": ("level", np.arange(1.0, K + 1), {"standard_name": "model_level_number", "units": "1"}),
        "latitude": ("latitude", lat, {"units": "degrees_north"}),
        "longitude": ("longitude", np.arange(W) * 360 / W, {"units": "degrees_east"}),
    }
    data = {}
    for name, field in air.items():
        dims = ("level", "latitude", "longitude")[3 - field.ndim :]
        if name != "zs":
            mean = field if name == "sp" else field.mean(axis=-1, keepdims=True)
            wave = field * 0.01 * np.sin(np.arange(W) * 2 * np.pi / W * 3) if name == "sp" else field - mean
            field, dims = np.stack([mean + np.roll(wave, n % W, axis=-1) for n in range(TIMES)]), ("time", *dims)
        data[name] = (dims, field.astype(np.float32), {"units": UNITS[name]})
    xr.Dataset(data, coords).to_netcdf(folder / "air.nc")
    return path


@pytest.mark.slow
def test_from_the_check_to_the_files(tmp_path: Path, command) -> None:
    config = write_air(tmp_path)
    for name in ("check", "train", "rollout"):
        done = command(name, config)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    ground = xr.load_dataset(tmp_path / "air.nc", decode_times=False).zs.values.astype(float)
    files = sorted((tmp_path / "run" / "forecasts").rglob("*.nc"))
    assert len(files) == 2
    from credit.config import load_config

    for path in files:
        with xr.open_dataset(path, decode_times=False) as data:
            assert data.attrs["post"] == "clamp, dry_mass, water, energy"
            every = {name: data[name].values.astype(float) for name in (*"tuvq", "sp", "tp", "e", *FLUXES)}
        steps = [
            totals(load_config(config), {name: field[n] for name, field in every.items()}, ground) for n in range(40)
        ]
        assert every["q"].min() >= 0 and every["tp"].min() >= 0
        rainy = 0
        for before, after in zip(steps, steps[1:], strict=False):
            assert after["dry"] == pytest.approx(steps[0]["dry"], rel=1e-6)
            expected_water = before["water"] - 1000 * (after["e"] + after["tp"])
            # a network that has hardly learnt may make more water than rain could take away: then there is none
            assert (
                after["water"] == pytest.approx(expected_water, rel=1e-6)
                or after["tp"] == 0
                and after["water"] > expected_water
            )
            rainy += after["tp"] > 0
            gained = after["tsr"] + after["ttr"] - sum(after[name] for name in FLUXES[2:])
            assert after["energy"] == pytest.approx(before["energy"] + gained, rel=1e-6)
        assert rainy > 10
    # the file with the coefficients is not needed any more: the checkpoint has them
    (tmp_path / "half.csv").rename(tmp_path / "elsewhere.csv")
    again = ("data.coefficients=" + str(tmp_path / "elsewhere.csv"),)
    done = command("train", config, "trainer.max_steps=7", *again)
    assert done.returncode == 0, done.stderr
    done = command("train", config, "trainer.max_steps=8", "model.postprocess=null", "data.coefficients=null")
    assert done.returncode == 1 and "model.postprocess" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_part_of_the_column_is_refused_before_anything_is_computed(tmp_path: Path, command) -> None:
    config = write_air(tmp_path)
    done = command("train", config, "data.levels=[3,4,5,6,7,8]")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "data.levels: 6 levels" in done.stderr and "would miss a part of the column" in done.stderr
