"""Conservation fixers through the commands: training, continuing, and ten-day forecasts with closed budgets."""

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
    config_document = raw_config(folder)
    config_document["data"] |= {"sources": [{"path": str(folder / "air.nc")}], "splits": CONFIG["data"]["splits"]}
    config_document["data"] |= {"split_gap": "1d", "valid_forecast_len": 2}
    config_document["model"] = {**CONFIG["model"], "postprocess": POST}
    config_document |= {
        "trainer": CONFIG["trainer"] | {"max_steps": 6, "validate_every": 3, "checkpoint_every": 3},
        "inference": {"lead_time": "240h", "initial_times": ["2000-02-08", "2000-02-09"]},
        "verification": CONFIG["verification"],
    }
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(config_document))

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
def test_forecast_files_have_closed_budgets(tmp_path: Path, command) -> None:
    config = write_air(tmp_path)
    for name in ("check", "train", "rollout"):
        result = command(name, config)
        assert result.returncode == 0, f"{name}: {result.stdout}{result.stderr}"
    ground = xr.load_dataset(tmp_path / "air.nc", decode_times=False).zs.values.astype(float)
    files = sorted((tmp_path / "run" / "forecasts").rglob("*.nc"))
    assert len(files) == 2
    from credit.config import load_config

    for path in files:
        with xr.open_dataset(path, decode_times=False) as data:
            assert data.attrs["post"] == "clamp, dry_mass, water, energy"
            fields = {name: data[name].values.astype(float) for name in (*"tuvq", "sp", "tp", "e", *FLUXES)}
        states = [
            totals(load_config(config), {name: field[n] for name, field in fields.items()}, ground) for n in range(40)
        ]
        assert fields["q"].min() >= 0 and fields["tp"].min() >= 0
        rainy = 0
        for state, next_state in zip(states, states[1:], strict=False):
            assert next_state["dry"] == pytest.approx(states[0]["dry"], rel=1e-6)
            expected_water = state["water"] - 1000 * (next_state["e"] + next_state["tp"])
            # An untrained network may create water. Precipitation is not negative, so it is 0 and a surplus remains.
            assert (
                next_state["water"] == pytest.approx(expected_water, rel=1e-6)
                or next_state["tp"] == 0
                and next_state["water"] > expected_water
            )
            rainy += next_state["tp"] > 0
            gained = next_state["tsr"] + next_state["ttr"] - sum(next_state[name] for name in FLUXES[2:])
            assert next_state["energy"] == pytest.approx(state["energy"] + gained, rel=1e-6)
        assert rainy > 10
    # The config gives the coefficients from a new path, because the old file is gone.
    (tmp_path / "half.csv").rename(tmp_path / "elsewhere.csv")
    moved_coefficients = ("data.coefficients=" + str(tmp_path / "elsewhere.csv"),)
    result = command("train", config, "trainer.max_steps=7", *moved_coefficients)
    assert result.returncode == 0, result.stderr
    result = command("train", config, "trainer.max_steps=8", "model.postprocess=null", "data.coefficients=null")
    assert result.returncode == 1 and "model.postprocess" in result.stderr and "Traceback" not in result.stderr, (
        result.stderr
    )


def test_incomplete_column_is_refused_before_training(tmp_path: Path, command) -> None:
    config = write_air(tmp_path)
    result = command("train", config, "data.levels=[3,4,5,6,7,8]")
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert "data.levels: 6 levels" in result.stderr and "would miss a part of the column" in result.stderr
