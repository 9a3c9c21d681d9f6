"""Runs that begin with the weights of a run with fewer channels or another grid (`trainer.resume_changes`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xarray as xr

from credit.cli.main import main
from tests.smoke.conftest import write_extra_variable

SHORT = ("trainer.max_steps=4", "trainer.validate_every=4", "trainer.checkpoint_every=4", "trainer.log_every=1")
# One training step with a learning rate so small that the weights stay equal.
FROZEN = ("trainer.max_steps=1", "trainer.validate_every=1", "trainer.checkpoint_every=1",
          "trainer.learning_rate=1e-30", "trainer.weight_decay=0", "trainer.use_ema=false")  # fmt: skip
FORECAST = ("inference.lead_time=24h", "inference.initial_times=[2000-02-10]")
NO_SPECTRAL_NORM = "model.use_spectral_norm=false"
# A new prognostic variable, a new forcing, and a new static field, each listed before the existing ones.
VARIABLES = (
    "data.variables.prognostic.vars_2D=[cloud, t2m]",
    "data.variables.dynamic_forcing.vars_2D=[cos_year, sst, toa_incident_solar_radiation]",
    "data.variables.static.vars_2D=[height, land, sin_latitude]",
)


@pytest.fixture
def base_arguments(small_run: Path) -> list[str]:
    """Arguments of a run with four training steps and one forecast. Its sources contain two unused variables."""
    write_extra_variable(small_run / "data.nc", small_run / "extra.nc")
    sources = f"data.sources=[{{path: {small_run / 'data.nc'}}}, {{path: {small_run / 'extra.nc'}}}]"
    arguments = [str(small_run / "config.yml"), sources, NO_SPECTRAL_NORM]
    assert main(["train", *arguments, *SHORT]) == 0
    assert main(["rollout", *arguments, *FORECAST]) == 0
    return arguments


def require_same_forecast(forecast: xr.Dataset, expected: xr.Dataset) -> None:
    """Assert that the variables of the base run have the same forecast as in the base run."""
    for name in ("z", "t2m", "rain"):
        xr.testing.assert_allclose(forecast[name], expected[name], rtol=1e-5, atol=1e-4)


def read_forecast(run: Path) -> xr.Dataset:
    """Return the only forecast of a run."""
    (path,) = (run / "forecasts").glob("*.nc")
    return xr.load_dataset(path)


def test_new_channels_leave_the_forecast_of_the_others_unchanged(
    small_run: Path, base_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    wider_arguments = [
        *base_arguments,
        *VARIABLES,
        f"save_loc={small_run / 'wider'}",
        f"trainer.resume={small_run / 'run'}",
    ]
    # Without the key, the message names it.
    assert main(["train", *wider_arguments, *FROZEN]) == 1
    assert "trainer.resume_changes: [channels]" in capsys.readouterr().err
    wider_arguments.append("trainer.resume_changes=[channels]")

    assert main(["check", *wider_arguments]) == 0
    output = capsys.readouterr().out
    assert "new input channels, whose initial weights are zeros: cloud, cos_year" in output
    assert "new output channels, whose initial weights are zeros: cloud" in output
    assert main(["train", *wider_arguments, *FROZEN]) == 0
    assert main(["rollout", *wider_arguments, *FORECAST]) == 0
    forecast, expected = read_forecast(small_run / "wider"), read_forecast(small_run / "run")
    require_same_forecast(forecast, expected)
    # The predicted change of the new prognostic channel is zero.
    cloud = forecast["cloud"]
    first = xr.open_dataset(small_run / "extra.nc")["cloud"].sel(time="2000-02-10T00:00")
    assert abs(cloud.isel(time=-1).squeeze(drop=True) - first.drop_vars("time")).max() < 1e-4

    # The run goes on from its own checkpoint, without the base, and its new channels learn.
    (small_run / "run").rename(small_run / "gone")
    assert main(["train", *wider_arguments, *SHORT, "trainer.use_ema=false"]) == 0
    assert main(["rollout", *wider_arguments, *FORECAST, "inference.folder=later", "inference.checkpoint=latest"]) == 0
    (path,) = (small_run / "wider" / "later").glob("*.nc")
    assert abs(xr.load_dataset(path)["cloud"] - cloud).max() > 1e-3


def test_exported_weights_may_have_fewer_channels(
    small_run: Path, base_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    weights = small_run / "weights.safetensors"
    assert main(["convert", *base_arguments, "--export", str(weights)]) == 0
    wider_arguments = [*base_arguments, *VARIABLES, f"save_loc={small_run / 'wider'}", f"trainer.resume={weights}"]
    wider_arguments.append("trainer.resume_changes=[channels]")
    capsys.readouterr()
    assert main(["check", *wider_arguments]) == 0
    assert "whose initial weights are zeros: cloud, cos_year" in capsys.readouterr().out
    assert main(["train", *wider_arguments, *FROZEN]) == 0
    assert main(["rollout", *wider_arguments, *FORECAST]) == 0
    forecast, expected = read_forecast(small_run / "wider"), read_forecast(small_run / "run")
    require_same_forecast(forecast, expected)


def test_other_changes_are_refused(
    small_run: Path, base_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    changed_arguments = [
        *base_arguments,
        f"save_loc={small_run / 'changed'}",
        f"trainer.resume={small_run / 'run'}",
        *FROZEN,
    ]
    allowed = "trainer.resume_changes=[channels]"
    assert main(["train", *changed_arguments, allowed, "data.variables.static.vars_2D=[land]"]) == 1
    assert "trained with sin_latitude, which is missing in data.variables" in capsys.readouterr().err
    groups = ("data.variables.prognostic.vars_2D=[rain, t2m]", "data.variables.diagnostic.vars_2D=[]")
    assert main(["train", *changed_arguments, allowed, *groups]) == 1
    assert "trained with rain as diagnostic, but it is prognostic in data.variables" in capsys.readouterr().err
    # Only new variables may have a new transform.
    assert main(["train", *changed_arguments, *VARIABLES, allowed, "data.transforms.rain.unit=0.5"]) == 1
    assert "data.transforms.rain.unit" in capsys.readouterr().err
    assert main(["train", *changed_arguments, *VARIABLES, allowed, "model.dim=[16, 32, 64, 128]"]) == 1
    assert "model.dim" in capsys.readouterr().err
    assert main(["train", *changed_arguments, "trainer.resume=auto", allowed]) == 2
    assert "needs resume: the folder of a different run" in capsys.readouterr().err
    checkpoint = (small_run / "run" / "checkpoints" / "latest").resolve()
    assert main(["train", *changed_arguments, *VARIABLES, f"trainer.resume={checkpoint}", allowed]) == 2
    assert "set trainer.resume to the folder of the run" in capsys.readouterr().err
    # Of the keys of the network, only those that depend on the grid may change with it.
    grid = ("data.grid={rows: 20, columns: 40, poles: false}", "trainer.resume_changes=[grid]")
    sizes = ("model.padding={lat: [6, 6], lon: [4, 4]}", "model.residual=false")
    assert main(["train", *changed_arguments, *grid, *sizes]) == 1
    error = capsys.readouterr().err
    assert "model.residual: True in the checkpoint, False in the config" in error and "model.padding" not in error


def test_weights_are_used_on_finer_grid(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(small_run / "config.yml")
    network = "model={type: sfno, dim: 16, depth: 2}"
    assert main(["train", config, network, *SHORT]) == 0
    network = "model={type: sfno, dim: 16, depth: 2, max_degree: 10}"
    changed_arguments = [
        config,
        network,
        "data.grid={rows: 20, columns: 40, poles: false}",
        f"save_loc={small_run / 'finer'}",
    ]
    changed_arguments += [f"trainer.resume={small_run / 'run'}", *FROZEN]
    assert main(["train", *changed_arguments]) == 2
    assert "trainer.resume_changes: [grid]" in capsys.readouterr().err
    changed_arguments.append("trainer.resume_changes=[grid]")
    assert main(["check", *changed_arguments, "model.max_degree=11"]) == 2
    assert "such as model.max_degree of sfno" in capsys.readouterr().out
    assert main(["check", *changed_arguments]) == 0
    assert "different grid" in capsys.readouterr().out
    assert main(["train", *changed_arguments]) == 0
    # On the finer grid, the network has the same skill as on the grid of its training.
    skill = {}
    for run in ("run", "finer"):
        rows = [json.loads(line) for line in (small_run / run / "metrics.jsonl").read_text().splitlines()]
        skill[run] = [row["valid"]["skill"] for row in rows if "valid" in row][-1]
    assert skill["finer"] == pytest.approx(skill["run"], rel=0.1)
