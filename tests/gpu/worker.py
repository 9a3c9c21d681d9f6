"""Takes training and forecast steps on a GPU that is not there; a process of its own, which prints what it saw.

python -m tests.gpu.worker        # JSON: case -> where the host waits, and the error
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from credit.cli.plan import build_grid
from credit.config import Config
from credit.config.sections.inference import EnsembleConfig
from credit.data.samples.batch import Batch
from credit.forecast.ensemble.feature_noise import build_feature_noise
from credit.forecast.ensemble.perturbations import build_perturbation
from credit.forecast.ensemble.sppt import build_tendency_perturbation
from credit.forecast.objectives.base import ObjectiveContext, build_objective
from credit.forecast.rollout import ForecastInputs, build_starts, forecast_batch, iterate_in_inference_mode
from credit.forecast.stepper import Stepper
from credit.models.inference import prepare_for_inference
from credit.parallel.host_copy import AsyncHostCopy
from credit.parallel.mesh import DeviceGrid, ParallelDims, build_mesh
from credit.parallel.process_info import fake_process_group
from credit.parallel.reduce import reduce_norm_and_flags
from credit.parallel.state.materialise import allocate_
from credit.train.build.assets import ModelAssets
from credit.train.build.dry_run import build_placeholder_assets
from credit.train.build.model import build_network, build_parallel_model
from credit.train.build.stepper import build_run_loss, build_stepper, compute_cell_weights
from credit.train.build.training import build_training_step
from credit.train.build.validation import build_metrics
from credit.train.ema import EMA
from credit.train.optim import build_optimizer
from credit.train.validate import shard_cases, validate
from tests.gpu.watch import CUDA, Watch, fake_gpu
from tests.unit.forecast import air
from tests.unit.hpc.measured import small_config

GRID = "32x64"
CPU, META = torch.device("cpu"), torch.device("meta")
ALONE = DeviceGrid()
PERTURBED = {"kind": "bred", "amplitude": 0.2, "cycles": 1, "cycle": "6h"}
ENSEMBLE = {"members": 3, "perturbation": PERTURBED, "stochastic": {}, "feature_noise": {"std": 0.1}}
# name -> overrides of the quickstart with a small network; a rollout has as many steps as data.forecast_len says
TRAINING = {
    "step": [],
    "step in bfloat16": ["trainer.amp=true", "model.decoder=transposed"],
    "two steps computed again": ["data.forecast_len=2", "trainer.amp=true"],
    "checkpointed, accumulated": ["trainer.activation_checkpoint=true", "trainer.grad_accum_every=2"],
    "selective, damped": ["trainer.activation_checkpoint=selective", "model.hyperdiffusion={time: 3h}"],
    "dropout, no spectral norm": ["model.attn_dropout=0.1", "model.ff_dropout=0.1", "model.use_spectral_norm=false"],
    "adapters": ["trainer.lora={rank: 2, targets: ['*.to_qkv']}", "trainer.resume=somewhere"],
    "adapters, selective": [
        "trainer.lora={rank: 2, targets: ['*.to_qkv', '*.expand']}",
        "trainer.resume=somewhere",
        "trainer.activation_checkpoint=selective",
    ],
    "bounds, transforms": ["data.variable_options.t2m={minimum: 200}", "data.transforms={msl: {kind: log1p, unit: 1}}"],
}
SPLIT = "split over two ranks"
# name -> inference.amp, ensemble
FORECASTS = {"forecast": (False, None), "forecast in bfloat16": (True, None), "ensemble": (False, ENSEMBLE)}
# name -> whether on pressure levels
BUDGETS = {"budgets on model levels": False, "budgets on pressure levels": True}
# what a step might do wrong -> what is to be said of it
WRONG = {
    "a tensor on the host": "devices",
    "a value that is read": "reads a value",
    "a value that is sent": "sends ()",
    "a list as index": "sends (2,)",
}


class Still:
    """Frames of a world in which nothing happens."""

    def __init__(self, assets: ModelAssets) -> None:
        self._assets = assets

    def prognostic(self, minutes: int) -> np.ndarray:
        return self._fields("prognostic")

    def forcing(self, minutes: int, initial: int | None = None) -> np.ndarray:
        return self._fields("dynamic_forcing")

    def _fields(self, group: str) -> np.ndarray:
        return np.zeros((len(self._assets.channels.group(group)), *self._assets.grid.shape), dtype=np.float32)


def batch_of(config: Config, assets: ModelAssets, steps: int) -> Batch:
    """Return a batch that is on the GPU already."""
    of = {group: len(assets.channels.group(group)) for group in ("prognostic", "dynamic_forcing")}
    samples, frames, cells = 2, config.data.history_len, assets.grid.shape
    return Batch(
        torch.zeros(samples, of["prognostic"], frames, *cells, device=CUDA),
        torch.zeros(samples, of["dynamic_forcing"], frames + steps - 1, *cells, device=CUDA),
        torch.zeros(samples, len(assets.channels.output), steps, *cells, device=CUDA),
        torch.zeros(samples, dtype=torch.int64, device=CUDA),
    )


def train(config: Config, assets: ModelAssets, mesh: DeviceGrid = ALONE) -> list[str]:
    """Take an optimizer step and a validation; return where the host waited in the step."""
    model, autocast = build_parallel_model(config, assets, mesh, META)
    loss = build_run_loss(config, assets, CPU)
    steps = config.data.forecast_len
    with fake_gpu():
        allocate_(model, CUDA)
        model.train()
        stepper, loss = build_stepper(config, assets, model, CUDA, autocast), loss.to(CUDA)
        optimizer, average = build_optimizer(model, config.trainer), EMA(model, 0.9)
        objective = build_objective(config.trainer.objective, ObjectiveContext(stepper, loss))
        step = build_training_step(config, objective, optimizer, average, lambda _: steps, 0)
        batches = iter([batch_of(config, assets, steps)] * 8)
        with Watch() as watch:
            result = step(batches, 0, 1e-3)
        assert all(one.device == CUDA for one in vars(result).values())
        assert all(p.device == CUDA for p in (*model.parameters(), *model.buffers(), *average.average.values()))
        halves = torch.bfloat16 in watch.dtypes
        assert halves == autocast, f"bfloat16: {halves}"
        with average.applied(), Watch():
            share = shard_cases(2, 2, 0, 1)
            metrics = build_metrics(config, assets, compute_cell_weights(assets, CUDA))
            scores = validate(objective, batches, share, metrics, steps, lambda: False)
        assert scores is not None and "rmse/z500/6h" in scores, scores
    return watch.seen


def train_split(config: Config, assets: ModelAssets) -> list[str]:
    """Do the same on the first of two ranks that share each sample; the other does not exist."""
    with fake_process_group(2):
        return train(config, assets, build_mesh(ParallelDims(tensor=2), 0, "cuda"))


def forecast_with(config: Config, assets: ModelAssets, ensemble: dict[str, Any] | None) -> list[str]:
    """Forecast two steps; return where the host waited from the second step on."""
    with META:
        model = build_network(config, assets.channels, assets.grid, assets.attributes)
    conf = None if ensemble is None else EnsembleConfig(**ensemble)
    frames, step = Still(assets), config.data.step_minutes
    with fake_gpu():
        allocate_(model, CUDA)
        prepare_for_inference(model.eval(), torch.bfloat16 if config.inference.amp else None)
        stepper = build_stepper(config, assets, model, CUDA, config.inference.amp)
        draw_factors = build_tendency_perturbation(conf, assets.grid, step)
        noise = build_feature_noise(conf, model)
        inputs = ForecastInputs(frames, step, 1)
        starts = build_starts([0], conf.members if conf else 1)
        perturb = conf and build_perturbation(conf, stepper, inputs, assets.grid)
        outputs = iterate_in_inference_mode(forecast_batch(stepper, inputs, starts, 2, perturb, draw_factors, noise))
        with Watch():
            assert next(outputs).device == CUDA
        with Watch() as watch:
            assert next(outputs).device == CUDA
    return watch.seen


def budgets(folder: Path, pressure: bool) -> list[str]:
    """Close every budget of a step, forward and backward; return where the host waited."""
    config, assets, _ = air.assemble(air.raw_config(folder, pressure))
    channels, cells = assets.channels, assets.grid.shape

    class Same(torch.nn.Module):
        def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
            return x_BCTHW[:, :1].repeat(1, len(channels.output), 1, 1, 1)

    with fake_gpu():
        stepper: Stepper = build_stepper(config, assets, Same(), CUDA, amp=False)
        state = torch.zeros(2, len(channels.group("prognostic")), 1, *cells, device=CUDA, requires_grad=True)
        forcing = torch.zeros(2, len(channels.group("dynamic_forcing")), 1, *cells, device=CUDA)
        with Watch() as watch:
            output = stepper.step(state, forcing)
            output.sum().backward()
            stepper.decode(output)
        assert output.device == state.grad.device == CUDA
    return watch.seen


def fetch() -> list[str]:
    """Fetch a tensor of the second GPU; return where the host waited before it asked for the values."""
    event = mock.Mock()
    with fake_gpu(), Watch() as watch, mock.patch("torch.cuda.current_stream") as stream:
        stream.return_value.record_event.return_value = event
        second = torch.device("cuda", 1)
        fetched = AsyncHostCopy(torch.zeros(3, device=second))
        assert stream.call_args == mock.call(second)
        assert not event.synchronize.called
        assert fetched.get().device == CPU
        assert event.synchronize.called
    return watch.seen


def offloaded() -> list[str]:
    """Take the norm of gradients in host memory, which must wait for the flags; return where else the host waited."""
    with fake_gpu(), Watch() as watch:
        norm, sums = reduce_norm_and_flags([torch.ones(3)], [torch.zeros((), device=CUDA)])
    assert norm.device == sums.device == CPU
    assert len(watch.seen) == 1 and watch.seen[0].endswith("fetches ()"), watch.seen
    return []


def wrong(name: str) -> list[str]:
    """Do what no step should; return where the host waited."""
    with fake_gpu(), Watch() as watch:
        x = torch.zeros(4, 3, device=CUDA, requires_grad=True)
        if name == "a tensor on the host":
            (x * torch.ones(3)).sum()
        elif name == "a value that is read":
            # in the backward pass, which has a thread of its own
            x.register_hook(lambda gradient: gradient * gradient.sum().item())
            x.square().sum().backward()
        elif name == "a value that is sent":
            x.new_tensor(1.0)
        else:
            x[:, [0, 2]].sum()
    return watch.seen


SINGLE = {"what is fetched": fetch, "gradients on the host": offloaded}


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield every case by its name."""
    grid = build_grid(GRID)
    for name, overrides in TRAINING.items():
        config = small_config("data.valid_forecast_len=2", *overrides)
        yield name, partial(train, config, build_placeholder_assets(config, grid, {}))
    config = small_config("trainer.parallelism={data: none, tensor: 2}", "trainer.amp=true")
    yield SPLIT, partial(train_split, config, build_placeholder_assets(config, grid, {}))
    for name, (amp, ensemble) in FORECASTS.items():
        config = small_config(f"inference.amp={amp}")
        yield name, partial(forecast_with, config, build_placeholder_assets(config, grid, {}), ensemble)
    for name, pressure in BUDGETS.items():
        yield name, partial(budgets, folder, pressure)
    for name, function in SINGLE.items():
        yield name, function
    for name in WRONG:
        yield name, partial(wrong, name)


def main() -> None:
    """Print the findings."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases(Path(folder)):
            try:
                found[name] = {"waits": case(), "error": ""}
            except Exception:
                found[name] = {"waits": [], "error": traceback.format_exc()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
