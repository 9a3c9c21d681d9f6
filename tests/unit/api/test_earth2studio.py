"""Tests of the prognostic model of earth2studio: its protocol, and fields bitwise equal to ``credit rollout``.

The tests have the protocol of earth2studio 0.19, which need not be installed. If it is, its own workflow runs, too.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import chdir
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import credit
from credit.api.interop.earth2studio import PrognosticModel
from credit.cli import main
from credit.errors import ConfigError
from tests.unit.cli.world import write_world

# Two input times, a diagnostic variable, and a forcing from data.
OVERRIDES = [
    "data.history_len=2",
    "data.variables.prognostic.vars_2D=[]",
    "data.variables.diagnostic={vars_2D: [t2m]}",
    "data.levels=[850,500]",
    "inference.lead_time=18h",
    "inference.batch_size=1",
    "inference.initial_times=[2000-01-09T00:00, 2000-01-09T06:00]",
    "data.splits.test=[2000-01-08, 2000-01-10]",
]
# Noise that lasts for several steps, and settings of the ensemble that differ from their defaults.
NOISE_OVERRIDES = [
    "model.noise=[{kind: global, channels: 4, memory: [12h]}, {kind: cell, channels: 2, memory: [step]}]",
    "loss.kind=crps",
    "trainer.members=2",
    "inference.ensemble={members: 3, seed: 5, model_noise: {amplitude: 1.5}}",
]
TIMES = np.array(["2000-01-09T00:00", "2000-01-09T06:00"], dtype="datetime64[ns]")
HOUR = np.timedelta64(1, "h")
OUTPUTS = ["t850", "t500", "t2m"]


def train_and_forecast(folder: Path, *overrides: str) -> Path:
    """Train a run in a folder and make its forecasts; return the folder."""
    write_world(folder)
    with chdir(folder):
        for name in ("train", "rollout"):
            assert main._run_command(name, ["config.yml", *OVERRIDES, *overrides], f"credit {name}") == 0
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a trained run and its forecasts."""
    return train_and_forecast(tmp_path_factory.mktemp("earth2studio"))


@pytest.fixture(scope="module")
def noise_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run whose network was trained with noise, and its ensemble forecasts."""
    return train_and_forecast(tmp_path_factory.mktemp("earth2studio_noise"), *NOISE_OVERRIDES)


@pytest.fixture
def model(folder: Path) -> PrognosticModel:
    return PrognosticModel.load(folder / "run", device="cpu")


@pytest.fixture(scope="module")
def fields(folder: Path) -> xr.Dataset:
    return xr.concat([xr.open_dataset(folder / f"data_{number}.nc") for number in (1, 2)], "time", data_vars="minimal")


def read_channel(dataset: xr.Dataset, name: str) -> xr.DataArray:
    """Return a channel, such as t850 or t2m."""
    return dataset[name] if name in dataset else dataset[name[0]].sel(level=float(name[1:]))


def make_input(model: PrognosticModel, fields: xr.Dataset, members: int) -> tuple[torch.Tensor, OrderedDict]:
    """Return an input with the dimensions ensemble and time, as workflows of earth2studio do."""
    coords = model.input_coords()
    rows = []
    for time in TIMES:
        frames = fields.sel(time=time + coords["lead_time"])
        rows.append(np.stack([read_channel(frames, name).values for name in coords["variable"]], axis=1))
    x = torch.from_numpy(np.stack(rows)).expand(members, -1, -1, -1, -1, -1)
    del coords["batch"]
    coords["time"] = TIMES
    coords = OrderedDict(ensemble=np.arange(members), **coords)
    return x.clone(), coords


def read_forecasts(folder: Path) -> np.ndarray:
    """Return the forecasts of the command, (initial time, lead time, [member,] channel, row, column)."""
    forecasts = []
    for path in sorted((folder / "run" / "forecasts").glob("*.nc")):
        with xr.open_dataset(path) as dataset:
            forecasts.append(np.stack([read_channel(dataset, name).values for name in OUTPUTS], axis=-3))
    return np.stack(forecasts)


def test_coordinates_of_input_and_output(model: PrognosticModel) -> None:
    coords = model.input_coords()
    assert list(coords) == ["batch", "time", "lead_time", "variable", "lat", "lon"]
    assert coords["batch"].shape == coords["time"].shape == (0,)
    np.testing.assert_array_equal(coords["lead_time"], [-6 * HOUR, 0 * HOUR])
    assert coords["variable"].tolist() == ["t850", "t500", "sst"]
    output = model.output_coords(coords)
    assert list(output) == list(coords) and output["variable"].tolist() == OUTPUTS
    np.testing.assert_array_equal(output["lead_time"], [6 * HOUR])
    later = OrderedDict({**coords, "lead_time": coords["lead_time"] + 12 * HOUR})
    np.testing.assert_array_equal(model.output_coords(later)["lead_time"], [18 * HOUR])
    for name, values, message in (
        ("variable", np.array(["t500", "t850", "sst"]), "variable: the input must have"),
        ("lat", coords["lat"][::-1], "lat: the input must have"),
        ("lead_time", np.array([-12 * HOUR, 0 * HOUR]), "lead_time: .* must be spaced"),
    ):
        with pytest.raises(ValueError, match=message):
            model.output_coords(OrderedDict({**coords, name: values}))
    coords.move_to_end("time")
    with pytest.raises(ValueError, match="the last dimensions must be time, lead_time"):
        model.output_coords(coords)


def test_an_iterator_gives_the_fields_of_the_command(model: PrognosticModel, folder: Path, fields: xr.Dataset) -> None:
    x, coords = make_input(model, fields, members=2)
    steps = list(islice(model.create_iterator(x, coords), 4))
    initial, initial_coords = steps[0]
    assert initial.shape == (2, 2, 1, 3, 16, 32) and initial_coords["variable"].tolist() == OUTPUTS
    np.testing.assert_array_equal(initial_coords["lead_time"], [0 * HOUR])
    np.testing.assert_array_equal(initial[..., :2, :, :], x[:, :, 1:, :2])
    assert initial[..., 2, :, :].isnan().all()
    expected = read_forecasts(folder)
    for number, (output, output_coords) in enumerate(steps[1:]):
        assert list(output_coords) == ["ensemble", "time", "lead_time", "variable", "lat", "lon"]
        np.testing.assert_array_equal(output_coords["lead_time"], [6 * (number + 1) * HOUR])
        for member in range(2):
            np.testing.assert_array_equal(output[member, :, 0].numpy(), expected[:, number])
    # Members with another initial state get another forecast.
    x[1, :, :, 0] += 1.0
    perturbed = list(islice(model.create_iterator(x, coords), 2))[1][0]
    np.testing.assert_array_equal(perturbed[0, :, 0].numpy(), expected[:, 0])
    assert not np.array_equal(perturbed[1, :, 0].numpy(), expected[:, 0])


def test_hooks_are_called_at_every_step(model: PrognosticModel, folder: Path, fields: xr.Dataset) -> None:
    x, coords = make_input(model, fields, members=1)
    expected = read_forecasts(folder)
    calls = []

    def front_hook(x: torch.Tensor, coords: OrderedDict) -> tuple:
        calls.append(("front", int(coords["lead_time"][-1] / HOUR), tuple(x.shape)))
        return x, coords

    def rear_hook(x: torch.Tensor, coords: OrderedDict) -> tuple:
        calls.append(("rear", int(coords["lead_time"][-1] / HOUR), tuple(x.shape)))
        return x + 1.0, coords

    model.front_hook = front_hook
    steps = [output for output, _ in islice(model.create_iterator(x, coords), 4)][1:]
    for number, output in enumerate(steps):
        np.testing.assert_allclose(output[0, :, 0].numpy(), expected[:, number], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(steps[0][0, :, 0].numpy(), expected[:, 0])
    assert calls == [("front", lead, (1, 2, 2, 3, 16, 32)) for lead in (0, 6, 12)]
    # Changes by the rear hook are in the output and in the state of the next step.
    calls.clear()
    model.rear_hook = rear_hook
    outputs_with_rear_hook = [output for output, _ in islice(model.create_iterator(x, coords), 3)][1:]
    np.testing.assert_allclose(outputs_with_rear_hook[0].numpy(), steps[0].numpy() + 1.0, rtol=1e-6)
    assert [call[:2] for call in calls] == [("front", 0), ("rear", 6), ("front", 6), ("rear", 12)]
    state = x.clone()
    state[:, :, 0], state[:, :, 1, :2] = x[:, :, 1], outputs_with_rear_hook[0][:, :, 0, :2]
    repeated_output, _ = model(state, OrderedDict({**coords, "lead_time": coords["lead_time"] + 6 * HOUR}))
    np.testing.assert_allclose(outputs_with_rear_hook[1].numpy(), repeated_output.numpy() + 1.0, rtol=1e-6)


def test_a_call_makes_one_step(model: PrognosticModel, folder: Path, fields: xr.Dataset) -> None:
    x, coords = make_input(model, fields, members=1)
    output, output_coords = model.to(torch.device("cpu"))(x, coords)
    np.testing.assert_array_equal(output[0, :, 0].numpy(), read_forecasts(folder)[:, 0])
    assert output_coords["variable"].tolist() == OUTPUTS


def test_models_without_support_are_refused(folder: Path, fields: xr.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = credit.load(folder / "run", device="cpu")
    renamed_model = PrognosticModel(loaded, names={"t": "theta", "t2m": "x"})
    assert renamed_model.input_coords()["variable"].tolist() == ["theta850", "theta500", "sst"]
    model_with_limit = PrognosticModel(loaded, max_lead_time="6h")
    with pytest.raises(ConfigError, match="max_lead_time: the forecast has reached 6h"):
        list(model_with_limit.create_iterator(*make_input(model_with_limit, fields, members=1)))
    monkeypatch.setattr(credit.Model, "level_units", "model_level")
    with pytest.raises(ConfigError, match="t: is on model levels"):
        PrognosticModel(loaded)


def test_members_have_the_noise_of_the_members_of_the_command(noise_folder: Path, fields: xr.Dataset) -> None:
    model = PrognosticModel.load(noise_folder / "run", device="cpu")
    x, coords = make_input(model, fields, members=2)
    expected = read_forecasts(noise_folder)
    assert not np.array_equal(expected[:, :, 1], expected[:, :, 2])
    # The ensemble workflow gives the members in batches.
    coords["ensemble"] = np.array([2, 1])
    outputs = [output for output, _ in islice(model.create_iterator(x, coords), 4)][1:]
    for number, output in enumerate(outputs):
        for row, member in enumerate((2, 1)):
            np.testing.assert_array_equal(output[row, :, 0].numpy(), expected[:, number, member])


def test_without_members_there_is_no_noise(noise_folder: Path, fields: xr.Dataset) -> None:
    model = PrognosticModel.load(noise_folder / "run", device="cpu")
    x, coords = make_input(model, fields, members=1)
    del coords["ensemble"]
    outputs = [output for output, _ in islice(model.create_iterator(x[0], coords), 3)][1:]
    one_step, _ = model(x[0], coords)
    np.testing.assert_array_equal(outputs[0].numpy(), one_step.numpy())
    forecast = credit.load(noise_folder / "run", device="cpu").forecast(fields, "12h", initial_time=TIMES[0], members=1)
    expected = np.stack([read_channel(forecast, name).values for name in OUTPUTS], axis=1)
    np.testing.assert_array_equal(torch.stack(outputs)[:, 0, 0].numpy(), expected)


def test_noise_in_single_steps_is_refused(noise_folder: Path, fields: xr.Dataset) -> None:
    model = PrognosticModel.load(noise_folder / "run", device="cpu")
    x, coords = make_input(model, fields, members=2)
    with pytest.raises(ConfigError, match="make its ensembles with create_iterator and without hooks"):
        model(x, coords)
    model.front_hook = lambda x, coords: (x, coords)
    with pytest.raises(ConfigError, match="make its ensembles with create_iterator and without hooks"):
        list(islice(model.create_iterator(x, coords), 2))


def test_unknown_names_and_wrong_units_are_refused(folder: Path) -> None:
    loaded = credit.load(folder / "run", device="cpu")
    variable = loaded.variables[0]
    loaded.variables = (credit.Variable("msl", "prognostic", (), "hPa", "data"),)
    with pytest.raises(ConfigError, match="msl: is in hPa in .*, and in Pa in earth2studio"):
        PrognosticModel(loaded)
    loaded.variables = (credit.Variable("graupel", "prognostic", (), "m", "data"),)
    with pytest.raises(ConfigError, match="graupel: its name in earth2studio is not known"):
        PrognosticModel(loaded)
    loaded.variables = (credit.Variable("tp", "diagnostic", (), "m", "data"), variable)
    model = PrognosticModel(loaded)
    assert model.output_coords(model.input_coords())["variable"].tolist() == ["tp06", "t850", "t500"]


def test_the_workflow_of_earth2studio(model: PrognosticModel, folder: Path, fields: xr.Dataset) -> None:
    pytest.importorskip("earth2studio")
    from earth2studio.io import XarrayBackend
    from earth2studio.models.px import PrognosticModel as Protocol
    from earth2studio.run import deterministic

    def source(time: np.ndarray, variable: np.ndarray) -> xr.DataArray:
        arrays = [read_channel(fields.sel(time=time), name).values for name in variable]
        cells = {"lat": model.input_coords()["lat"], "lon": model.input_coords()["lon"]}
        coords = {"time": time, "variable": variable, **cells}
        return xr.DataArray(np.stack(arrays, axis=1), dims=tuple(coords), coords=coords)

    assert isinstance(model, Protocol)
    output = deterministic(TIMES, 3, model, source, XarrayBackend(), device=torch.device("cpu"), verbose=False).root
    for index, name in enumerate(OUTPUTS):
        np.testing.assert_array_equal(output[name].values[:, 1:], read_forecasts(folder)[:, :, index])
