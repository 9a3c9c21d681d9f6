"""Published weights forecast through the commands, and give the reference's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
import yaml
from safetensors import safe_open

CASE = "wxformer_transposed_earth"
LEVELS = [10, 60, 100, 120, 137]
VARIABLES = [("U", level) for level in LEVELS] + [("V", level) for level in LEVELS] + [("SP", None), ("t2m", None)]


@pytest.fixture
def published(tmp_path: Path, repository: Path) -> Path:
    """A folder as a user of published weights has it: weights, mean, std, static, one analysis, a config."""
    folder = repository / "tests" / "data" / "golden"
    golden = np.load(folder / f"{CASE}.npz")
    settings = json.loads((folder / f"{CASE}.json").read_text())["wxformer"]
    prefix = "state::"
    state = {key.removeprefix(prefix): torch.from_numpy(golden[key]) for key in golden.files if key.startswith(prefix)}
    torch.save({"model_state_dict": state, "epoch": 3}, tmp_path / "model.pt")

    x = golden["x"][0, :, 0]
    rows, columns = x.shape[1:]
    lat = 90 - 180 / rows * (np.arange(rows) + 0.5)
    coords = {
        "latitude": ("latitude", lat, {"units": "degrees_north"}),
        "longitude": ("longitude", np.arange(columns) * 360 / columns, {"units": "degrees_east"}),
    }
    random = np.random.default_rng(3)
    mean = {channel: random.normal(0, 50) for channel in VARIABLES}
    std = {channel: random.uniform(0.5, 20) for channel in VARIABLES}
    for name, values in (("mean", mean), ("std", std)):
        arrays = {v: ("level", [values[v, level] for level in LEVELS]) for v in ("U", "V")}
        arrays |= {v: ((), values[v, None]) for v in ("SP", "t2m")}
        xr.Dataset(arrays, {"level": LEVELS}).to_netcdf(tmp_path / f"{name}.nc")
    cells = ("latitude", "longitude")
    # the files run from south to north: the import must turn them
    static = xr.Dataset({"Z_GDS4_SFC": (cells, x[12]), "LSM": (cells, x[13])}, coords)
    static.isel(latitude=slice(None, None, -1)).to_netcdf(tmp_path / "static.nc")
    physical = {channel: x[i].astype(np.float64) * std[channel] + mean[channel] for i, channel in enumerate(VARIABLES)}
    fields = {v: (("time", "level", *cells), np.stack([physical[v, level] for level in LEVELS])[None]) for v in "UV"}
    fields |= {v: (("time", *cells), physical[v, None][None]) for v in ("SP", "t2m")}
    time = ("time", [0.0], {"units": "hours since 2020-06-01", "calendar": "standard"})
    xr.Dataset(fields, {"time": time, "level": ("level", LEVELS, {"units": "1"}), **coords}).to_netcdf(
        tmp_path / "analysis.nc"
    )
    derived = ("image_height", "image_width", "in_channels", "out_channels", "frames", "output_frames")
    config = {
        "save_loc": str(tmp_path / "run"),
        "data": {
            "sources": [{"path": str(tmp_path / "analysis.nc")}, {"path": str(tmp_path / "static.nc")}],
            "levels": LEVELS,
            "level_units": "model_level",
            "variables": {
                "prognostic": {"vars_3D": ["U", "V"], "vars_2D": ["SP", "t2m"]},
                "static": {"vars_2D": ["Z_GDS4_SFC", "LSM"]},
            },
            "input_order": ["prognostic", "static", "dynamic_forcing"],
            "splits": {
                "train": ["2000-01-01", "2000-12-31"],
                "valid": ["2001-02-01", "2001-12-31"],
                "test": ["2020-01-11", "2020-12-31"],
            },
        },
        "model": {"type": "wxformer", "residual": False}
        | {key: value for key, value in settings.items() if key not in derived},
        "trainer": {"max_steps": 1, "device": "cpu"},
        "inference": {"initial_times": ["2020-06-01"], "lead_time": "6h"},
    }
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    expected = golden["y_eval"][0, :, 0]
    truth = {channel: expected[i] * std[channel] + mean[channel] for i, channel in enumerate(VARIABLES)}
    np.savez(tmp_path / "truth.npz", **{f"{v}_{level}": value for (v, level), value in truth.items()})
    return tmp_path


def files(folder: Path) -> list[str]:
    return [f"--{name}={folder / file}" for name, file in
            (("weights", "model.pt"), ("mean", "mean.nc"), ("std", "std.nc"), ("static", "static.nc"))]  # fmt: skip


@pytest.mark.slow
def test_published_weights_forecast(published: Path, command) -> None:
    config = published / "config.yml"
    done = command("convert", config, *files(published))
    assert done.returncode == 0, done.stderr
    done = command("rollout", config)
    assert done.returncode == 0, done.stderr
    truth = np.load(published / "truth.npz")
    with xr.open_dataset(published / "run" / "forecasts" / "forecast_2020-06-01T00.nc") as forecast:
        for variable, level in VARIABLES:
            field = forecast[variable].isel(time=0)
            if level is not None:
                field = field.isel({field.dims[0]: LEVELS.index(level)})
            expected = truth[f"{variable}_{level}"]
            assert np.abs(field.values - expected).max() < 2e-5 * expected.std() + 1e-5 * np.abs(expected).max()
    exported = command("convert", config, "--export", published / "out.safetensors")
    assert exported.returncode == 0, exported.stderr
    with safe_open(published / "out.safetensors", "pt") as file:
        assert json.loads(file.metadata()["credit"])["step"] == 0
        assert len(file.keys()) > 100


@pytest.mark.slow
def test_what_is_wrong_with_the_files_is_said(published: Path, command) -> None:
    config = published / "config.yml"
    for extra, says in (
        (["--levels=10,60,100,120,136"], "no level 136"),
        (["--variables=U,W"], "no variable W"),
        (["model.dim=[16,32,64,128]"], "of another model"),
        ([f"--weights={published / 'mean.nc'}"], "is not a file of torch.save"),
        ([f"--static={published / 'mean.nc'}"], "has no coordinate latitude"),
    ):
        done = command("convert", config, *files(published), *extra)
        assert done.returncode in (1, 2) and says in done.stderr, (extra, done.stderr)
        assert "Traceback" not in done.stderr
        assert not list(published.glob("run/checkpoints/*"))
    done = command("convert", config, "--weights", "x.pt")
    assert done.returncode == 2 and "--mean, --std, --static" in done.stderr
