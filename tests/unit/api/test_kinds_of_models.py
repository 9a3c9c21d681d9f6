"""Tests that models of all kinds make the same forecasts with `credit.load` and `credit rollout`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import yaml

import credit
from credit.cli import main
from credit.errors import ConfigError
from tests.registries import isolate
from tests.unit.cli import world

PLUGIN = "tests.plugins.window_network"
NOISE = "[{kind: global, channels: 4, memory: [step]}, {kind: cell, channels: 2, memory: [step]}]"
# Overrides of the config by the kind of model.
KINDS = {
    "bfloat16": ["trainer.amp=true", "inference.amp=true"],
    "missing values": [
        "data.variables.prognostic.vars_2D=[t2m, sst]",
        "data.variables.dynamic_forcing.vars_2D=[sin_year]",
        "data.variable_options.sst.missing=fill_mean",
    ],
    "noise": [
        f"model.noise={NOISE}",
        "loss.kind=crps",
        "trainer.members=2",
        "inference.ensemble.members=3",
    ],
    "plugin": [],
}
# `credit.load` computes one initial time at a time, and the last bit depends on the size of the batch.
ROLLOUT = "inference.batch_size=1"
LORA = ["trainer.resume=run/checkpoints/latest", "save_loc=tuned", 'trainer.lora={rank: 2, targets: ["*.to_qkv"]}']


@pytest.fixture(autouse=True)
def _isolate_registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the network of the plugin from the registries after the test."""
    isolate(monkeypatch)
    yield
    sys.modules.pop(PLUGIN, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with a config and data whose sea surface temperature is missing on land."""
    world.write_world(tmp_path)
    for file in (1, 2):
        sst = world.make_fields(seed=10 * file)["sst"]
        sst[:, :4, :6] = np.nan
        world.write_data_file(tmp_path, file, {"sst": sst})
    return tmp_path


def run_command(folder: Path, name: str, *overrides: str) -> None:
    with chdir(folder):
        assert main._run_command(name, ["config.yml", *overrides], f"credit {name}") == 0


def require_equal_forecasts(folder: Path, run: Path) -> xr.Dataset:
    """Forecast from datasets and compare with the first file of `credit rollout`; return the forecast."""
    expected = xr.open_dataset(sorted((run / "forecasts").glob("*.nc"))[0])
    fields = xr.concat(
        [xr.open_dataset(folder / f"data_{number}.nc") for number in (1, 2)], "time", data_vars="minimal"
    )
    with chdir(folder):
        model = credit.load(run, device="cpu")
    initial_time = expected["forecast_reference_time"].values
    forecast = model.forecast(fields, "6h", initial_time=initial_time)
    assert sorted(forecast.data_vars) == sorted(set(expected.data_vars) & set(forecast.data_vars))
    for name in forecast.data_vars:
        values, expected_values = forecast[name].values, expected[name].values
        if "member" in forecast.dims:
            # The command computes one member at a time, `credit.load` all of them.
            np.testing.assert_allclose(values, expected_values, rtol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(values, expected_values, err_msg=name)
    for member in range(forecast.sizes.get("member", 0)):
        single = model.forecast(fields, "6h", initial_time=initial_time, only_member=member)
        assert "member" not in single.dims
        for name in single.data_vars:
            np.testing.assert_array_equal(single[name].values, expected[name].isel(member=member).values, err_msg=name)
    with pytest.raises(ConfigError, match="only_member: 7 is "):
        model.iterate(fields, "6h", only_member=7)
    return forecast


@pytest.mark.parametrize("kind", KINDS)
def test_forecasts_of_the_command_and_of_the_loaded_model_are_equal(kind: str, folder: Path) -> None:
    if kind == "plugin":
        config = {**world.CONFIG, "plugins": [PLUGIN], "model": {"type": "window_network", "width": 16}}
        (folder / "config.yml").write_text(yaml.safe_dump(config))
    overrides = KINDS[kind] + ([] if kind == "missing values" else ["data.variable_options.sst.missing=fill_mean"])
    run_command(folder, "train", *overrides)
    run_command(folder, "rollout", *overrides, ROLLOUT)
    forecast = require_equal_forecasts(folder, folder / "run")
    if kind == "noise":
        assert forecast.sizes["member"] == 3 and (forecast["t"].std("member") > 0).any()
    if kind == "missing values":
        is_land = np.zeros((world.ROWS, world.COLUMNS), dtype=bool)
        is_land[:4, :6] = True
        np.testing.assert_array_equal(np.isnan(forecast["sst"].values[0]), is_land)


def test_forecasts_of_a_fine_tuned_model_are_equal(folder: Path) -> None:
    filled = "data.variable_options.sst.missing=fill_mean"
    run_command(folder, "train", filled)
    run_command(folder, "train", filled, *LORA)
    run_command(folder, "rollout", filled, *LORA, ROLLOUT)
    require_equal_forecasts(folder, folder / "tuned")
