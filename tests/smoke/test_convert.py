"""Published weights through the commands: their forecasts equal those of the reference implementation."""

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


# Dimensions of the network that follow from the data; the config of a run must not have them.
DERIVED_SETTINGS = ("image_height", "image_width", "in_channels", "out_channels", "frames", "output_frames")
# Date of the only analysis.
INITIAL_TIME = "2020-06-01"


@pytest.fixture
def published_folder(tmp_path: Path, repository: Path) -> Path:
    """Folder with the files of a user of published weights: weights, mean, std, static fields, one analysis, a config.

    The file truth.npz has the expected forecast in physical units, one array for each variable and level.
    """
    folder = repository / "tests" / "data" / "golden"
    golden = np.load(folder / f"{CASE}.npz")
    settings = json.loads((folder / f"{CASE}.json").read_text())["wxformer"]
    state = {}
    for key in golden.files:
        if key.startswith("state::"):
            state[key.removeprefix("state::")] = torch.from_numpy(golden[key])
    torch.save({"model_state_dict": state, "epoch": 3}, tmp_path / "model.pt")

    # The reference's input is normalised; any mean and std give physical fields.
    random = np.random.default_rng(3)
    mean = {channel: random.normal(0, 50) for channel in VARIABLES}
    std = {channel: random.uniform(0.5, 20) for channel in VARIABLES}
    write_statistics(tmp_path / "mean.nc", mean)
    write_statistics(tmp_path / "std.nc", std)
    input_CHW = golden["x"][0, :, 0]
    write_static_and_analysis(tmp_path, input_CHW, mean, std)
    (tmp_path / "config.yml").write_text(yaml.safe_dump(build_published_config(tmp_path, settings)))

    expected_CHW = golden["y_eval"][0, :, 0]
    truth = {}
    for index, (variable, level) in enumerate(VARIABLES):
        channel = (variable, level)
        truth[f"{variable}_{level}"] = expected_CHW[index] * std[channel] + mean[channel]
    np.savez(tmp_path / "truth.npz", **truth)
    return tmp_path


def write_statistics(path: Path, values: dict[tuple[str, int | None], float]) -> None:
    """Write one number for each variable and level, in the format of published files of means and stds."""
    arrays = {}
    for variable in ("U", "V"):
        arrays[variable] = ("level", [values[variable, level] for level in LEVELS])
    for variable in ("SP", "t2m"):
        arrays[variable] = ((), values[variable, None])
    xr.Dataset(arrays, {"level": LEVELS}).to_netcdf(path)


def write_static_and_analysis(folder: Path, input_CHW: np.ndarray, mean: dict, std: dict) -> None:
    """Write static.nc and analysis.nc with the fields of a normalised input of the network."""
    rows, columns = input_CHW.shape[1:]
    latitudes = 90 - 180 / rows * (np.arange(rows) + 0.5)
    coords = {
        "latitude": ("latitude", latitudes, {"units": "degrees_north"}),
        "longitude": ("longitude", np.arange(columns) * 360 / columns, {"units": "degrees_east"}),
    }
    cells = ("latitude", "longitude")
    # The rows of the static file run from south to north, so the import must reverse them.
    static = xr.Dataset({"Z_GDS4_SFC": (cells, input_CHW[12]), "LSM": (cells, input_CHW[13])}, coords)
    static.isel(latitude=slice(None, None, -1)).to_netcdf(folder / "static.nc")

    physical = {}
    for index, channel in enumerate(VARIABLES):
        physical[channel] = input_CHW[index].astype(np.float64) * std[channel] + mean[channel]
    fields = {}
    for variable in ("U", "V"):
        column = np.stack([physical[variable, level] for level in LEVELS])
        fields[variable] = (("time", "level", *cells), column[None])
    for variable in ("SP", "t2m"):
        fields[variable] = (("time", *cells), physical[variable, None][None])
    time = ("time", [0.0], {"units": f"hours since {INITIAL_TIME}", "calendar": "standard"})
    level = ("level", LEVELS, {"units": "1"})
    xr.Dataset(fields, {"time": time, "level": level, **coords}).to_netcdf(folder / "analysis.nc")


def build_published_config(folder: Path, settings: dict[str, object]) -> dict[str, object]:
    """Return the config of a run with the network of the reference and the files in `folder`."""
    network = {key: value for key, value in settings.items() if key not in DERIVED_SETTINGS}
    return {
        "save_loc": str(folder / "run"),
        "data": {
            "sources": [{"path": str(folder / "analysis.nc")}, {"path": str(folder / "static.nc")}],
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
        "model": {"type": "wxformer", "residual": False, **network},
        "trainer": {"max_steps": 1, "device": "cpu"},
        "inference": {"initial_times": [INITIAL_TIME], "lead_time": "6h"},
    }


def import_options(folder: Path) -> list[str]:
    """Return the options of ``credit convert`` that name the published files."""
    files = {"weights": "model.pt", "mean": "mean.nc", "std": "std.nc", "static": "static.nc"}
    return [f"--{option}={folder / file}" for option, file in files.items()]


def require_reference_forecast(folder: Path) -> None:
    """Require that the forecast of the run in `folder` is that of the reference."""
    truth = np.load(folder / "truth.npz")
    with xr.open_dataset(folder / "run" / "forecasts" / "forecast_2020-06-01T00.nc") as forecast:
        for variable, level in VARIABLES:
            field = forecast[variable].isel(time=0)
            if level is not None:
                field = field.isel({field.dims[0]: LEVELS.index(level)})
            expected = truth[f"{variable}_{level}"]
            assert np.abs(field.values - expected).max() < 2e-5 * expected.std() + 1e-5 * np.abs(expected).max()


@pytest.mark.slow
def test_published_weights_forecast(published_folder: Path, command) -> None:
    config = published_folder / "config.yml"
    for arguments in (("convert", config, *import_options(published_folder)), ("rollout", config)):
        process = command(*arguments)
        assert process.returncode == 0, process.stderr
    require_reference_forecast(published_folder)
    exported = command("convert", config, "--export", published_folder / "out.safetensors")
    assert exported.returncode == 0, exported.stderr
    with safe_open(published_folder / "out.safetensors", "pt") as file:
        assert json.loads(file.metadata()["credit"])["step"] == 0
        assert len(file.keys()) > 100


def build_miles_config(folder: Path, settings: dict[str, object]) -> dict[str, object]:
    """Return a config of miles-credit (generation 1) for the network and the files in `folder`."""
    names = ("dim", "depth", "dim_head", "global_window_size", "local_window_size", "cross_embed_kernel_sizes",
             "cross_embed_strides", "use_spectral_norm", "interp", "frames", "image_height", "image_width")  # fmt: skip
    network = {name: settings[name] for name in names if name in settings}
    padding = settings["padding"]
    return {
        "save_loc": str(folder / "run"),
        "data": {
            "variables": ["U", "V"],
            "save_loc": str(folder / "analysis.nc"),
            "surface_variables": ["SP", "t2m"],
            "save_loc_surface": str(folder / "analysis.nc"),
            "static_variables": ["Z_GDS4_SFC", "LSM"],
            "save_loc_static": str(folder / "static.nc"),
            "level_ids": LEVELS,
            "mean_path": str(folder / "mean.nc"),
            "std_path": str(folder / "std.nc"),
            "scaler_type": "std_new",
            "train_years": [2000, 2018],
            "valid_years": [2019, 2021],
            "history_len": 1,
            "forecast_len": 0,
            "lead_time_periods": 6,
        },
        "model": {
            "type": "crossformer",
            **network,
            "padding_conf": {
                "activate": True, "mode": padding["mode"], "pad_lat": padding["lat"], "pad_lon": padding["lon"],
            },
        },
        "trainer": {"type": "standard", "mode": "none", "epochs": 1, "batches_per_epoch": 1, "learning_rate": "1e-4"},
        "loss": {"training_loss": "mse", "use_latitude_weights": True, "use_variable_weights": False},
        "predict": {"forecasts": {"days": 0.25}},
    }  # fmt: skip


@pytest.mark.slow
def test_a_config_of_miles_credit_and_its_weights_forecast(published_folder: Path, command, repository: Path) -> None:
    """The YAML file and the weights are enough to give the forecast of the reference."""
    settings = json.loads((repository / "tests" / "data" / "golden" / f"{CASE}.json").read_text())["wxformer"]
    (published_folder / "theirs.yml").write_text(yaml.safe_dump(build_miles_config(published_folder, settings)))
    # Statistics of static fields, which generation 1 does not use.
    for name in ("mean.nc", "std.nc"):
        with xr.open_dataset(published_folder / name) as statistics:
            statistics = statistics.load().assign(LSM=((), 3.0))
        statistics.to_netcdf(published_folder / name)
    config = published_folder / "converted.yml"
    converted = command(
        "convert", published_folder / "theirs.yml", "-o", config, "--weights", published_folder / "model.pt"
    )
    assert converted.returncode == 0, converted.stderr
    rolled_out = command("rollout", config, f"inference.initial_times=[{INITIAL_TIME}]", "trainer.device=cpu")
    assert rolled_out.returncode == 0, rolled_out.stderr
    require_reference_forecast(published_folder)


@pytest.mark.slow
def test_invalid_import_files_are_refused(published_folder: Path, command) -> None:
    config = published_folder / "config.yml"
    for overrides, message in (
        (["--levels=10,60,100,120,136"], "no level 136"),
        (["--variables=U,W"], "no variable W"),
        (["model.dim=[16,32,64,128]"], "of a different model"),
        ([f"--weights={published_folder / 'mean.nc'}"], "is not a file of torch.save"),
        ([f"--static={published_folder / 'mean.nc'}"], "has no coordinate latitude"),
    ):
        process = command("convert", config, *import_options(published_folder), *overrides)
        assert process.returncode in (1, 2) and message in process.stderr, (overrides, process.stderr)
        assert "Traceback" not in process.stderr
        assert not list(published_folder.glob("run/checkpoints/*"))
    process = command("convert", config, "--weights", "x.pt")
    assert process.returncode == 2 and "--mean, --std, --static" in process.stderr


@pytest.mark.slow
def test_published_weights_with_noise(published_folder: Path, command) -> None:
    """Members with dropout differ without training. The other kinds of noise have no effect before training."""
    config = published_folder / "config.yml"
    members = {}
    for name, noise in (("quiet", "[global, cell, spherical]"), ("dropout", "[dropout, cell]")):
        run = [
            config,
            f"save_loc={published_folder / name}",
            f"model.noise={noise}",
            "trainer.members=2",
            "loss.kind=crps",
        ]
        imported = command("convert", *run, *import_options(published_folder))
        assert imported.returncode == 0, imported.stderr
        rolled_out = command("rollout", *run, "inference.ensemble={members: 2}")
        assert rolled_out.returncode == 0, rolled_out.stderr
        with xr.open_dataset(published_folder / name / "forecasts" / "forecast_2020-06-01T00.nc") as forecast:
            members[name] = forecast["t2m"].transpose("member", ...).to_numpy()
    np.testing.assert_allclose(*members["quiet"], rtol=1e-6)
    assert np.abs(members["dropout"][0] - members["dropout"][1]).max() > 1e-3
