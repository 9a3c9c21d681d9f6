"""Training and forecast steps of a run on random fields on the device, so that no data are opened.

Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.device.cases import Run
from credit.cli.plan import TrainingStepBuilder, build_grid, build_plan_inputs, load_config_without_paths
from credit.config import Config
from credit.data.samples.batch import Batch
from credit.forecast.objectives.base import MicroStep
from credit.forecast.stepper import Stepper
from credit.hpc.planner.gpus import find_gpu
from credit.hpc.planner.mesh import Planner
from credit.hpc.planner.planned_run import PlannedRun
from credit.models.inference import prepare_for_inference
from credit.models.initialise import initial_values
from credit.parallel.mesh import DeviceGrid, ParallelDims
from credit.parallel.state.materialise import fill_
from credit.train.build.assets import ModelAssets
from credit.train.build.dry_run import build_placeholder_assets
from credit.train.build.model import build_parallel_model
from credit.train.build.stepper import build_stepper
from credit.train.build.training import build_run_objective, build_training_step
from credit.train.ema import EMA
from credit.train.monitor.flops import FlopCounter
from credit.train.optim import build_optimizer
from credit.utils.malloc import retain_freed_memory

LEARNING_RATE = 1e-4


def load_run(run: Run) -> tuple[Config, ModelAssets]:
    """Return the config of a run and assets with placeholder statistics."""
    config = load_config_without_paths(run.config, run.overrides)
    return config, build_placeholder_assets(config, build_grid(run.grid), {})


def random_batch(config: Config, assets: ModelAssets, device: torch.device) -> Batch:
    """Return the batch of a micro-step with normally distributed fields, which are the same on every device."""
    generator = torch.Generator().manual_seed(1)
    samples = config.trainer.train_batch_size
    history_len = config.data.history_len
    steps = config.data.forecast_len
    cells = assets.grid.shape
    num_prognostic = len(assets.channels.group("prognostic"))
    num_forcing = len(assets.channels.group("dynamic_forcing"))
    return Batch(
        torch.randn(samples, num_prognostic, history_len, *cells, generator=generator),
        # Each step after the first needs the forcing of one more time.
        torch.randn(samples, num_forcing, history_len + steps - 1, *cells, generator=generator),
        torch.randn(samples, len(assets.channels.output), steps, *cells, generator=generator),
        tuple(360 * sample for sample in range(samples)),
    ).to(device)


class TrainingWork:
    """The training step of a run on a device, with the run's network, loss, optimizer and average.

    Args:
        run: the run.
        device: the device of the step.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        retain_freed_memory(device)
        self.config, self.assets = load_run(run)
        self.model, autocast = build_parallel_model(self.config, self.assets, DeviceGrid(), device)
        fill_(self.model, initial_values(self.model, self.config.seed))
        self.stepper = build_stepper(self.config, self.assets, self.model.train(), device, autocast)
        self.objective = build_run_objective(self.config, self.assets, self.stepper, device)
        self.optimizer = build_optimizer(self.model, self.config.trainer)
        trainer = self.config.trainer
        average = EMA(self.model, trainer.ema_decay) if trainer.use_ema else None
        self._rollout_steps = self.config.data.forecast_len
        self._step = build_training_step(
            self.config, self.objective, self.optimizer, average, lambda _: self._rollout_steps, 0
        )
        self.batch = random_batch(self.config, self.assets, device)
        self.samples = trainer.train_batch_size * trainer.grad_accum_every

    @torch.no_grad()
    def fill_zero_weights(self) -> None:
        """Set weights that are initialised with zeros to small random values, for example the weights that add noise.

        Members without noise are equal, and the CRPS has no gradient with respect to the difference of equal members.
        """
        generator = torch.Generator().manual_seed(3)
        for parameter in self.model.parameters():
            if not parameter.any():
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))

    def step(self) -> Tensor:
        """Take an optimizer step with the same batch in each micro-step, and return its loss."""
        return self._step(itertools.repeat(self.batch), 0, LEARNING_RATE).loss

    def gradients(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-step and the gradients of all weights, on the CPU in float64."""
        self.optimizer.zero_grad(set_to_none=True)
        self.stepper.begin_iteration()
        micro_step = MicroStep(0, list(range(1, self._rollout_steps + 1)))
        loss = self.objective.accumulate_gradients(self.batch, micro_step)
        gradients = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.detach().cpu().double()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach().cpu().double(), gradients

    def count_operations(self) -> dict[str, float]:
        """Return name of a peak rate -> TFLOP of an optimizer step at this rate; empty if they cannot be counted."""
        counts = FlopCounter(self.config, self.assets).count_operations_by_precision(self._rollout_steps)
        if counts is None:
            return {}
        # Members that are computed one by one run forward twice, but that is not counted as useful work.
        repetitions = self.config.trainer.grad_accum_every * self.config.trainer.members
        return {rate: count * repetitions / 1e12 for rate, count in counts.items()}


@dataclass
class ForecastWork:
    """Forecasts of a run with random weights, prepared as by `credit rollout`.

    Attributes:
        stepper: runs the network.
        state_BCTHW: normalised state at the start.
        forcing_BCTHW: normalised forcing, the same at every step.
    """

    stepper: Stepper
    state_BCTHW: Tensor
    forcing_BCTHW: Tensor

    @classmethod
    def build(cls, run: Run, device: torch.device) -> ForecastWork:
        """Build the forecasts of a run, with ``inference.batch_size`` forecasts in the batch."""
        config, assets = load_run(run)
        # Sets the precision of products, too.
        model, _ = build_parallel_model(config, assets, DeviceGrid(), device)
        fill_(model, initial_values(model, config.seed))
        prepare_for_inference(model.eval(), torch.bfloat16 if config.inference.amp else None)
        stepper = build_stepper(config, assets, model, device, config.inference.amp)
        generator = torch.Generator().manual_seed(2)
        frames = (config.data.history_len, *assets.grid.shape)
        batch_size = config.inference.batch_size
        num_prognostic = len(assets.channels.group("prognostic"))
        num_forcing = len(assets.channels.group("dynamic_forcing"))
        state = torch.randn(batch_size, num_prognostic, *frames, generator=generator)
        forcing = torch.randn(batch_size, num_forcing, *frames, generator=generator)
        return cls(stepper, state.to(device), forcing.to(device))

    @property
    def states(self) -> int:
        """Number of forecasts in the batch."""
        return self.state_BCTHW.shape[0]

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Return the output (B, C, H, W) of one step in physical units."""
        return self.stepper.decode(self.stepper.step(self.state_BCTHW, self.forcing_BCTHW))

    @torch.inference_mode()
    def rollout(self, num_steps: int) -> Tensor:
        """Return the normalised output (B, C, H, W) after some steps."""
        return list(self.stepper.rollout(self.state_BCTHW, lambda _: self.forcing_BCTHW, num_steps))[-1]


def plan_device_bytes(run: Run) -> int:
    """Return the memory of a training step on one GPU in bytes, as estimated by `credit plan`.

    The memory of CUDA and the workspace of kernels are not included. Planning takes seconds.
    """
    config, assets, num_samples = build_plan_inputs(run.config, run.overrides, run.grid)
    step_builder = TrainingStepBuilder(config, assets)
    values_per_sample = len(assets.channels.output) * math.prod(assets.grid.shape)
    planned_run = PlannedRun(
        config.trainer,
        {0.0: config.data.forecast_len},
        num_samples,
        step_builder,
        output_bytes=4 * config.trainer.train_batch_size * values_per_sample,
        gathers_members=step_builder.gathers_members,
    )
    # The memory does not depend on the kind of GPU.
    planner = Planner(planned_run, 1, find_gpu("h100"))
    return planner.plan_mesh("none", ParallelDims(), config.trainer.activation_checkpoint).memory.device_bytes


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference of two tensors, divided by the norm of `expected`; both on any device."""
    expected = expected.detach().cpu().double()
    difference = actual.detach().cpu().double() - expected
    return (difference.norm() / expected.norm()).item()


def compare_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float, str]:
    """Compare gradients, and return the relative difference of all weights and of the weight that differs most.

    Args:
        actual: name of a weight -> gradient.
        expected: name of a weight -> gradient to compare with.

    Returns:
        Norm of the difference over all weights, divided by the norm of `expected`; the largest relative difference of a
        single weight; and the name of this weight. If the norm of a weight's gradient is less than a thousandth of the
        norm over all weights, its difference is divided by this thousandth instead.

    Raises:
        ValueError: if the weights differ.
    """
    if actual.keys() != expected.keys():
        raise ValueError(f"gradients of other weights: {sorted(actual.keys() ^ expected.keys())[:5]}")
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    square_sum = torch.zeros((), dtype=torch.float64)
    worst = (0.0, "")
    for name, gradient in expected.items():
        difference = (actual[name] - gradient).norm()
        square_sum += difference.square()
        worst = max(worst, ((difference / gradient.norm().clamp(min=1e-3 * norm)).item(), name))
    return (square_sum.sqrt() / norm).item(), *worst
