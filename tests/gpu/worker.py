"""Process that takes training and forecast steps with fake GPU tensors, and prints where the host waits.

python -m tests.gpu.worker        # JSON: case -> waits of the host, and the error
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
from tests.gpu.watch import CUDA, HostWaitRecorder, fake_gpu
from tests.unit.forecast import air
from tests.unit.hpc.measured import small_config

GRID = "32x64"
CPU, META = torch.device("cpu"), torch.device("meta")
SINGLE_DEVICE = DeviceGrid()
BRED_PERTURBATION = {"kind": "bred", "amplitude": 0.2, "cycles": 1, "cycle": "6h"}
ENSEMBLE = {"members": 3, "perturbation": BRED_PERTURBATION, "stochastic": {}, "feature_noise": {"std": 0.1}}
# Name of a case -> overrides of the quickstart with a small network. A rollout has data.forecast_len steps.
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
# Name of a case -> inference.amp, and the section inference.ensemble.
FORECASTS = {"forecast": (False, None), "forecast in bfloat16": (True, None), "ensemble": (False, ENSEMBLE)}
# Name of a case -> True for pressure levels.
BUDGETS = {"budgets on model levels": False, "budgets on pressure levels": True}
# Name of a faulty operation -> a part of the expected error or wait.
FAULTY_OPERATIONS = {
    "a tensor on the host": "devices",
    "a value that is read": "reads a value",
    "a value that is sent": "sends ()",
    "a list as index": "sends (2,)",
}


class ConstantFrames:
    """Reader of frames whose fields are all zero."""

    def __init__(self, assets: ModelAssets) -> None:
        self._assets = assets

    def prognostic(self, minutes: int) -> np.ndarray:
        return self._fields("prognostic")

    def forcing(self, minutes: int, initial: int | None = None) -> np.ndarray:
        return self._fields("dynamic_forcing")

    def _fields(self, group: str) -> np.ndarray:
        return np.zeros((len(self._assets.channels.group(group)), *self._assets.grid.shape), dtype=np.float32)


def build_batch(config: Config, assets: ModelAssets, steps: int) -> Batch:
    """Return a batch of zeros on the GPU."""
    num_channels = {group: len(assets.channels.group(group)) for group in ("prognostic", "dynamic_forcing")}
    samples, frames, cells = 2, config.data.history_len, assets.grid.shape
    return Batch(
        torch.zeros(samples, num_channels["prognostic"], frames, *cells, device=CUDA),
        torch.zeros(samples, num_channels["dynamic_forcing"], frames + steps - 1, *cells, device=CUDA),
        torch.zeros(samples, len(assets.channels.output), steps, *cells, device=CUDA),
        torch.zeros(samples, dtype=torch.int64, device=CUDA),
    )


def train(config: Config, assets: ModelAssets, mesh: DeviceGrid = SINGLE_DEVICE) -> list[str]:
    """Take an optimizer step and run a validation; return the waits of the host in the step."""
    model, autocast = build_parallel_model(config, assets, mesh, META)
    loss = build_run_loss(config, assets, CPU)
    steps = config.data.forecast_len
    with fake_gpu():
        allocate_(model, CUDA)
        model.train()
        stepper, loss = build_stepper(config, assets, model, CUDA, autocast), loss.to(CUDA)
        optimizer, ema = build_optimizer(model, config.trainer), EMA(model, 0.9)
        objective = build_objective(config.trainer.objective, ObjectiveContext(stepper, loss))
        step = build_training_step(config, objective, optimizer, ema, lambda _: steps, 0)
        batches = iter([build_batch(config, assets, steps)] * 8)
        with HostWaitRecorder() as watch:
            result = step(batches, 0, 1e-3)
        assert all(tensor.device == CUDA for tensor in vars(result).values())
        assert all(p.device == CUDA for p in (*model.parameters(), *model.buffers(), *ema.average.values()))
        uses_bfloat16 = torch.bfloat16 in watch.dtypes
        assert uses_bfloat16 == autocast, f"bfloat16: {uses_bfloat16}"
        with ema.applied(), HostWaitRecorder():
            share = shard_cases(2, 2, 0, 1)
            metrics = build_metrics(config, assets, compute_cell_weights(assets, CUDA))
            scores = validate(objective, batches, share, metrics, steps, lambda: False)
        assert scores is not None and "rmse/z500/6h" in scores, scores
    return watch.seen


def train_tensor_parallel(config: Config, assets: ModelAssets) -> list[str]:
    """Train on the first of two tensor-parallel ranks, with a fake process group and without the second rank."""
    with fake_process_group(2):
        return train(config, assets, build_mesh(ParallelDims(tensor=2), 0, "cuda"))


def forecast_with(config: Config, assets: ModelAssets, ensemble: dict[str, Any] | None) -> list[str]:
    """Forecast two steps; return the waits of the host in the second step."""
    with META:
        model = build_network(config, assets.channels, assets.grid, assets.attributes)
    ensemble_config = None if ensemble is None else EnsembleConfig(**ensemble)
    frames, step = ConstantFrames(assets), config.data.step_minutes
    with fake_gpu():
        allocate_(model, CUDA)
        prepare_for_inference(model.eval(), torch.bfloat16 if config.inference.amp else None)
        stepper = build_stepper(config, assets, model, CUDA, config.inference.amp)
        draw_factors = build_tendency_perturbation(ensemble_config, assets.grid, step)
        noise = build_feature_noise(ensemble_config, model)
        inputs = ForecastInputs(frames, step, 1)
        starts = build_starts([0], ensemble_config.members if ensemble_config else 1)
        perturb = ensemble_config and build_perturbation(ensemble_config, stepper, inputs, assets.grid)
        outputs = iterate_in_inference_mode(forecast_batch(stepper, inputs, starts, 2, perturb, draw_factors, noise))
        with HostWaitRecorder():
            assert next(outputs).device == CUDA
        with HostWaitRecorder() as watch:
            assert next(outputs).device == CUDA
    return watch.seen


def apply_fixers(folder: Path, pressure: bool) -> list[str]:
    """Apply all fixers to a step, forward and backward; return the waits of the host."""
    config, assets, _ = air.assemble(air.raw_config(folder, pressure))
    channels, cells = assets.channels, assets.grid.shape

    class RepeatedInput(torch.nn.Module):
        def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
            return x_BCTHW[:, :1].repeat(1, len(channels.output), 1, 1, 1)

    with fake_gpu():
        stepper: Stepper = build_stepper(config, assets, RepeatedInput(), CUDA, amp=False)
        state = torch.zeros(2, len(channels.group("prognostic")), 1, *cells, device=CUDA, requires_grad=True)
        forcing = torch.zeros(2, len(channels.group("dynamic_forcing")), 1, *cells, device=CUDA)
        with HostWaitRecorder() as watch:
            output = stepper.step(state, forcing)
            output.sum().backward()
            stepper.decode(output)
        assert output.device == state.grad.device == CUDA
    return watch.seen


def copy_from_second_gpu() -> list[str]:
    """Copy a tensor of the second GPU to the host; return the waits of the host."""
    event = mock.Mock()
    with fake_gpu(), HostWaitRecorder() as watch, mock.patch("torch.cuda.current_stream") as stream:
        stream.return_value.record_event.return_value = event
        second_gpu = torch.device("cuda", 1)
        host_copy = AsyncHostCopy(torch.zeros(3, device=second_gpu))
        assert stream.call_args == mock.call(second_gpu)
        assert not event.synchronize.called
        assert host_copy.get().device == CPU
        assert event.synchronize.called
    return watch.seen


def reduce_offloaded_gradients() -> list[str]:
    """Compute the norm of gradients in host memory. The host must wait for the flags; return all other waits."""
    with fake_gpu(), HostWaitRecorder() as watch:
        norm, sums = reduce_norm_and_flags([torch.ones(3)], [torch.zeros((), device=CUDA)])
    assert norm.device == sums.device == CPU
    assert len(watch.seen) == 1 and watch.seen[0].endswith("fetches ()"), watch.seen
    return []


def run_faulty_operation(name: str) -> list[str]:
    """Run an operation that a step must not contain; return the waits of the host."""
    with fake_gpu(), HostWaitRecorder() as watch:
        x = torch.zeros(4, 3, device=CUDA, requires_grad=True)
        if name == "a tensor on the host":
            (x * torch.ones(3)).sum()
        elif name == "a value that is read":
            # The value is read in the backward pass, which has a thread of its own.
            x.register_hook(lambda gradient: gradient * gradient.sum().item())
            x.square().sum().backward()
        elif name == "a value that is sent":
            x.new_tensor(1.0)
        else:
            x[:, [0, 2]].sum()
    return watch.seen


HOST_COPIES = {"what is fetched": copy_from_second_gpu, "gradients on the host": reduce_offloaded_gradients}


def list_cases(folder: Path) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield the name and the function of each case."""
    grid = build_grid(GRID)
    for name, overrides in TRAINING.items():
        config = small_config("data.valid_forecast_len=2", *overrides)
        yield name, partial(train, config, build_placeholder_assets(config, grid, {}))
    config = small_config("trainer.parallelism={data: none, tensor: 2}", "trainer.amp=true")
    yield SPLIT, partial(train_tensor_parallel, config, build_placeholder_assets(config, grid, {}))
    for name, (amp, ensemble) in FORECASTS.items():
        config = small_config(f"inference.amp={amp}")
        yield name, partial(forecast_with, config, build_placeholder_assets(config, grid, {}), ensemble)
    for name, pressure in BUDGETS.items():
        yield name, partial(apply_fixers, folder, pressure)
    for name, function in HOST_COPIES.items():
        yield name, function
    for name in FAULTY_OPERATIONS:
        yield name, partial(run_faulty_operation, name)


def main() -> None:
    """Run all cases and print the results as JSON."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in list_cases(Path(folder)):
            try:
                results[name] = {"waits": case(), "error": ""}
            except Exception:
                results[name] = {"waits": [], "error": traceback.format_exc()}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
