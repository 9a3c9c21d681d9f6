"""Tests of all networks, most of them through the commands.

They cover restart, forecasts, ranks, ensembles, adapters, compilation and the plan.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
import yaml

from credit.cli.main import main
from credit.config.registry import MODELS
from credit.models.base import ForecastModel, ModelSpec
from credit.models.initialise import initialise_
from credit.models.registry import build_model, model_class, model_names
from credit.train.build.model import compile_blocks
from tests.networks.networks import DIVIDED, FIRST_LAYERS, LORA_TARGETS, NOISE, PLANNED_SECTIONS, REFUSAL, SECTIONS
from tests.parallel.forked import launch
from tests.smoke.conftest import world, write_extra_variable
from tests.unit.hpc.measured import measure_peak_bytes, small_config, traced

pytestmark = pytest.mark.slow

# With a constant learning rate, a longer run is a continuation of a shorter one.
CONSTANT_RATE = (
    "trainer.schedule={kind: constant, warmup: 0}", "trainer.log_every=1", "data.forecast_len=2",
    "trainer.validate_every=3", "trainer.checkpoint_every=2", "trainer.max_steps=3", "trainer.optimizer=muon",
)  # fmt: skip
FORECASTS = ("inference.lead_time=24h", "inference.initial_times=[2000-02-09T00:00, 2000-02-11T06:00]")


@dataclass(frozen=True)
class TrainedNetwork:
    """Network that one process has trained for three steps.

    Attributes:
        name: ``model.type``.
        folder: folder with ``config.yml`` and the run folder ``run``.
    """

    name: str
    folder: Path

    @property
    def config(self) -> str:
        """Path of the config."""
        return str(self.folder / "config.yml")

    @property
    def noise(self) -> str:
        """Override that adds every kind of noise that the network supports."""
        kinds = [NOISE[kind] for kind in model_class(self.name).conditions]
        return f"model.noise={json.dumps(kinds)}"

    def train_on(self, num_ranks: int, run: str, *overrides: str) -> list[dict[str, Any]]:
        """Train on several ranks into a run folder; return its rows of training steps."""
        arguments = (self.config, *CONSTANT_RATE, f"save_loc={self.folder / run}", *overrides)
        launch("credit.cli.main", num_ranks, "train", *arguments)
        return read_steps(self.folder / run)


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log that belong to training steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def require_equal_steps(rows: list[dict[str, Any]], expected_rows: list[dict[str, Any]]) -> None:
    """Require the same losses and gradient norms at the same steps."""
    assert [row["step"] for row in rows] == [row["step"] for row in expected_rows]
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5), row["step"]
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4), row["step"]


@pytest.fixture(scope="module", params=SECTIONS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedNetwork:
    folder = world(tmp_path_factory.mktemp(request.param))
    config = yaml.safe_load((folder / "config.yml").read_text())
    config["model"] = SECTIONS[request.param]
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    assert main(["train", str(folder / "config.yml"), *CONSTANT_RATE]) == 0
    return TrainedNetwork(request.param, folder)


def test_suite_covers_every_network() -> None:
    """A network that is added to the package must be added to this suite."""
    built_in = [name for name in model_names() if model_class(name).__module__.startswith("credit.")]
    assert sorted(SECTIONS) == built_in


def test_restart_is_exact(network: TrainedNetwork) -> None:
    run = f"save_loc={network.folder / 'parts'}"
    for num_steps in (2, 3):
        assert main(["train", network.config, *CONSTANT_RATE, f"trainer.max_steps={num_steps}", run]) == 0
    keys = ("step", "loss", "grad_norm")
    restarted_rows, uninterrupted_rows = read_steps(network.folder / "parts"), read_steps(network.folder / "run")
    assert [[row[key] for key in keys] for row in restarted_rows] == [
        [row[key] for key in keys] for row in uninterrupted_rows
    ]


def test_forecasts_and_scores(network: TrainedNetwork) -> None:
    """Forecast files and forecasts that are computed while scoring give the same scores."""
    run = network.folder / "run"
    assert main(["rollout", network.config, *FORECASTS]) == 0
    assert main(["verify", network.config, *FORECASTS]) == 0
    scores = pd.read_csv(run / "scores.csv")
    assert np.isfinite(scores.loc[scores["metric"] == "rmse", "value"]).all()
    assert main(["verify", network.config, *FORECASTS, "--online"]) == 0
    pd.testing.assert_frame_equal(pd.read_csv(run / "scores.csv"), scores)


def require_equal_forecasts(folder: Path, expected_folder: Path, tolerance: float) -> None:
    """Require the same files with nearly equal fields.

    Args:
        folder: folder of netCDF files.
        expected_folder: folder of the files to compare with.
        tolerance: largest difference, in units of the largest value of a variable.
    """
    names = [path.name for path in sorted(expected_folder.glob("*.nc"))]
    assert names and names == [path.name for path in sorted(folder.glob("*.nc"))]
    for name in names:
        with xr.open_dataset(folder / name) as data, xr.open_dataset(expected_folder / name) as expected:
            for variable, values in expected.data_vars.items():
                limit = tolerance * float(np.abs(values).max())
                np.testing.assert_allclose(data[variable], values, rtol=0, atol=limit, err_msg=str(variable))


def test_sharded_and_split_weights(network: TrainedNetwork) -> None:
    """Training with FSDP2, tensor parallelism and activation checkpointing equals that of one process."""
    mesh = (
        "trainer.parallelism={data: fsdp2, tensor: 2}", "trainer.activation_checkpoint=true",
        "trainer.train_batch_size=2",
    )  # fmt: skip
    require_equal_steps(network.train_on(4, "mesh", *mesh), read_steps(network.folder / "run"))


def test_members_on_two_ranks(network: TrainedNetwork) -> None:
    """Training on the CRPS, with every kind of noise that the network supports, is equal on one and two ranks."""
    if not model_class(network.name).conditions:
        pytest.skip(f"{network.name} takes no noise")
    ensemble = (network.noise, "loss.kind=crps", "trainer.members=2", "trainer.valid_members=2")
    expected = network.train_on(1, "ensemble", *ensemble)
    require_equal_steps(network.train_on(2, "members", *ensemble, "trainer.parallelism.ensemble=2"), expected)


def test_divided_fields(network: TrainedNetwork) -> None:
    """Training and forecasts on divided fields equal those of one process. Networks without support refuse them."""
    if network.name not in DIVIDED:
        with pytest.raises(AssertionError, match=REFUSAL):
            network.train_on(2, "divided", "trainer.parallelism.domain=2")
        return
    require_equal_steps(
        network.train_on(2, "divided", "trainer.parallelism.domain=2"), read_steps(network.folder / "run")
    )
    forecasts = (network.config, *FORECASTS)
    assert main(["rollout", *forecasts, "inference.folder=whole"]) == 0
    divided = ("inference.parallelism.domain={lat: 1, lon: 2}", "inference.folder=divided")
    launch("credit.cli.main", 2, "rollout", *forecasts, *divided)
    run = network.folder / "run"
    require_equal_forecasts(run / "divided", run / "whole", tolerance=1e-5)


def test_export_and_adapters(network: TrainedNetwork) -> None:
    """A run with adapters starts with the loss of the exported weights, and then trains."""
    weights = network.folder / "weights.safetensors"
    assert main(["convert", network.config, "--export", str(weights)]) == 0
    plain = network.train_on(1, "plain", f"trainer.resume={weights}")
    adapters = f"trainer.lora={{rank: 2, targets: {json.dumps(LORA_TARGETS[network.name])}}}"
    adapted = network.train_on(1, "adapted", f"trainer.resume={network.folder / 'run'}", adapters)
    # The power iteration of spectral norm continues for trained weights, but not for frozen weights.
    assert adapted[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-3)
    assert adapted[0]["grad_norm"] > 0
    assert adapted[-1]["loss"] != adapted[0]["loss"]


def test_fine_tuning_with_new_channels_and_frozen_weights(network: TrainedNetwork) -> None:
    """Fine-tuning with new channels, frozen first layers and lower learning rates is equal on one and two ranks."""
    extra = network.folder / "extra.nc"
    write_extra_variable(network.folder / "data.nc", extra)
    base = (
        f"trainer.resume={network.folder / 'run'}",
        "trainer.resume_changes=[channels]",
        f"data.sources=[{{path: {network.folder / 'data.nc'}}}, {{path: {extra}}}]",
        "data.variables.diagnostic.vars_2D=[cloud, rain]",
        "data.variables.dynamic_forcing.vars_2D=[sin_year, sst, toa_incident_solar_radiation]",
    )
    factors = {FIRST_LAYERS[network.name]: 0, "*": 0.1}
    settings = (*base, f"trainer.learning_rate_factors={json.dumps(factors)}")
    rows = network.train_on(1, "frozen", *settings)
    require_equal_steps(network.train_on(2, "frozen_on_ranks", *settings, "trainer.train_batch_size=2"), rows)
    all_rows = network.train_on(1, "thawed", *base)
    assert rows[0]["loss"] == pytest.approx(all_rows[0]["loss"], rel=1e-3)
    assert 0 < rows[0]["grad_norm"] < all_rows[0]["grad_norm"]


def test_bfloat16(network: TrainedNetwork) -> None:
    rows = network.train_on(1, "bfloat16", "trainer.amp=true")
    for row, expected in zip(rows, read_steps(network.folder / "run"), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=0.03), row["step"]


def build_seeded_network(name: str) -> ForecastModel:
    """Return a network with initial weights from a fixed seed."""
    section = MODELS.find_section(name).model_validate(SECTIONS[name])
    spec = ModelSpec.from_sizes(image_height=16, image_width=32, in_channels=3, out_channels=2, vector_channels=(0, 1))
    model = build_model(spec, section)
    initialise_(model, seed=3)
    return model


# Warnings of torch.compile itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_blocks(network: TrainedNetwork) -> None:
    """Blocks compile as whole graphs, and compute the same outputs and gradients."""
    model = build_seeded_network(network.name)
    compiled = copy.deepcopy(model)
    compile_blocks(compiled, backend="aot_eager")
    x_BCTHW = torch.randn(2, 3, 1, 16, 32, generator=torch.Generator().manual_seed(1))
    gradients = []
    outputs = []
    for module in (model, compiled):
        module.train()
        output = module(x_BCTHW)
        output.square().mean().backward()
        outputs.append(output.detach())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in module.parameters()]))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
    assert (gradients[1] - gradients[0]).norm() < 1e-5 * gradients[0].norm()


def test_planned_memory(network: TrainedNetwork) -> None:
    """The planned memory of activations is within 10 % of what a step allocates."""
    config = small_config(f"model={json.dumps(PLANNED_SECTIONS[network.name])}")
    assert traced(config).activations == pytest.approx(measure_peak_bytes(config), rel=0.1)
