"""``credit plan``: predict memory, communication, time and energy of a run on N GPUs, without the GPUs."""

from __future__ import annotations

import argparse
import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from credit.cli.common import add_config_arguments
from credit.cli.console.terminal import print_json
from credit.cli.planning.failure_options import add_failure_arguments, read_failure_assumptions
from credit.cli.planning.notices import suppress_notices
from credit.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from credit.config import Config
    from credit.data.samples.batch import Batch
    from credit.grid import LatLonGrid
    from credit.hpc.planner.planned_run import Checkpointing, MemberBatches
    from credit.losses.base import Loss
    from credit.losses.member_loss import LossPart
    from credit.parallel.domain.domain import Domain
    from credit.parallel.mesh import DeviceGrid
    from credit.train.build.assets import ModelAssets

HELP = """Predict memory and communication of a training run on N GPUs, and recommend a mesh of ranks. No GPU is needed.

The command compares meshes (replicate x shard x domain x tensor). It computes memory, operations and collectives from
a training step on tensors without memory. The output marks exact numbers and upper bounds. Every time, speed and energy
is an estimate from the data sheets of the GPU (roofline model) and of the links. The time that the host needs to queue
a kernel was measured on one machine; other hosts need a different time (--launch).

The last table gives the best interval between checkpoints, and the share of the time that is lost to GPU failures.

The grid and the number of samples are read from the data. Without the data, give the size of the grid with --grid.

example:
  credit plan config.yml --world-size 64 --gpu h100
  credit plan config.yml --world-size 64 --grid 721x1440
  credit plan config.yml --world-size 64 --samples-per-step 16

exit code: 0 a mesh fits, 2 no mesh fits, or the config is wrong."""

# Grid (rows x columns) on which the loss is built. Its fields are then resized to the run's grid.
_COARSE_GRID = "8x16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit plan`: CONFIG, overrides, number and type of GPUs, grid and ``--json``."""
    from credit.hpc.planner.gpus import list_gpu_names

    add_config_arguments(parser)
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of GPUs (one rank per GPU)")
    parser.add_argument(
        "--gpu", default="h100", metavar="NAME", help=f"type of GPU: {', '.join(list_gpu_names())}; default h100"
    )
    parser.add_argument(
        "--per-node", type=int, metavar="N", help="GPUs per node; default: the usual number for this GPU"
    )
    parser.add_argument(
        "--network", type=float, metavar="GBS", help="bandwidth between nodes in GB/s, per GPU and direction"
    )
    parser.add_argument("--launch", type=float, metavar="US", help="time that the host needs to queue a kernel, in us")
    parser.add_argument("--grid", metavar="ROWSxCOLUMNS", help="size of a global grid; the data are then not read")
    parser.add_argument(
        "--samples-per-step", type=int, metavar="N", help="largest number of samples in an optimizer step; default: any"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON document")
    add_failure_arguments(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Print the plan of the run; return the exit status 0.

    Raises:
        ConfigError: if the config or the name of the GPU is wrong, or no mesh of the ranks fits into the GPU memory.
    """
    from credit.config.batch_division import divide_global_batch
    from credit.hpc.planner.failures.failure_plan import failures_to_dict, format_failures, plan_failures
    from credit.hpc.planner.gpus import find_gpu
    from credit.hpc.planner.plan import make_plan
    from credit.hpc.planner.planned_run import PlannedRun
    from credit.hpc.planner.report import format_plan, plan_to_dict
    from credit.parallel.mesh import plan_degrees

    assumptions = read_failure_assumptions(arguments)
    gpu = find_gpu(arguments.gpu, arguments.per_node, arguments.network, arguments.launch)
    with suppress_notices():
        config, assets, num_samples = build_plan_inputs(arguments.config, arguments.overrides, arguments.grid)
        max_samples = arguments.samples_per_step
        if config.trainer.global_batch_size is not None:
            # The batch sizes of the config's mesh. On other meshes they may give more samples per step; these meshes
            # are left out.
            degrees = plan_degrees(config.trainer.parallelism, arguments.world_size)
            config = divide_global_batch(config, degrees.num_sample_ranks)
            max_samples = min(max_samples or config.trainer.global_batch_size, config.trainer.global_batch_size)
        # Fraction of the run -> number of rollout steps from this fraction on. A constant number begins at fraction 0.
        rollout = config.trainer.forecast_len_from or {0.0: config.data.forecast_len}
        step_builder = TrainingStepBuilder(config, assets)
        # Size in bytes of the float32 output of one batch (B, C, H, W).
        values_per_sample = len(assets.channels.output) * math.prod(assets.grid.shape)
        planned_run = PlannedRun(
            config.trainer,
            rollout,
            num_samples,
            step_builder,
            output_bytes=4 * config.trainer.train_batch_size * values_per_sample,
            gathers_members=step_builder.gathers_members,
            max_samples_per_step=max_samples,
            times_per_sample=config.data.history_len + max(rollout.values()),
            bytes_per_time=4 * len(assets.channels.time_varying_stored) * math.prod(assets.grid.shape),
        )
        plan = make_plan(planned_run, arguments.world_size, gpu)
    failures = plan_failures(plan, planned_run, assumptions)
    if arguments.json:
        print_json(plan_to_dict(plan, planned_run) | {"failures": failures_to_dict(failures)})
    else:
        print(format_plan(plan, planned_run), format_failures(failures), sep="\n\n")
    return 0


def build_plan_inputs(path: str, overrides: Sequence[str], grid: str | None) -> tuple[Config, ModelAssets, int]:
    """Return the inputs of the plan of a run: config, channels, grid and number of samples.

    Args:
        path: config file.
        overrides: ``section.key=value``.
        grid: ``ROWSxCOLUMNS`` of a global grid, for a plan without the data; None to open the data.

    Returns:
        The config; the model's assets (channels, grid, normalization), whose values are dummies; the number of training
        samples.

    Raises:
        ConfigError: if the config is wrong, or the data cannot be opened and no grid is given.
    """
    import numpy as np

    from credit.calendar import Calendar
    from credit.config import load_config
    from credit.data.splits import build_splits, require_samples
    from credit.train.build.dry_run import build_placeholder_assets
    from credit.train.build.open_data import open_data_and_splits

    if grid is not None:
        config = load_config_without_paths(path, overrides)
        # Without data, the training period is taken to have a time at every time step.
        calendar = Calendar()
        data = config.data
        split = build_splits(data, calendar)["train"]
        times = np.arange(split.first, split.last + 1, data.step_minutes)
        initial_times = require_samples(times, split, calendar, data, data.forecast_len)
        assets = build_placeholder_assets(config, build_grid(grid), {})
        return config, assets, len(initial_times)

    # With the data, the plan uses their grid and times.
    config = load_config(path, overrides)
    try:
        reader, splits = open_data_and_splits(config)
    except DataError as error:
        raise ConfigError(f"{error}\nwithout the data, give the size of the grid: --grid ROWSxCOLUMNS") from error
    initial_times = require_samples(
        reader.times, splits["train"], reader.calendar, config.data, config.data.forecast_len
    )
    assets = build_placeholder_assets(config, reader.grid, reader.attributes)
    return config, assets, len(initial_times)


def load_config_without_paths(path: str, overrides: Sequence[str]) -> Config:
    """Return a config for a plan without the data. Paths and environment variables in the config need not exist.

    No path is opened. Keys with paths are set to the current folder or to None. The sections ``pbs``, ``slurm`` and
    ``model.postprocess`` are left out.

    Args:
        path: config file.
        overrides: ``section.key=value``.

    Raises:
        ConfigError: if a key of another section has an error.
    """
    from credit.config.load import build_config, read_config

    document = dict(read_config(path, overrides))
    # A plan does not need clusters and accounts, and their keys often contain environment variables.
    for section in ("pbs", "slurm"):
        document.pop(section, None)
    document["save_loc"] = "."
    data = document.get("data")
    # Values of an unexpected type are not changed, so that the schema reports them.
    if isinstance(data, dict) and isinstance(data.get("sources"), list):
        sources = []
        for source in data["sources"]:
            if isinstance(source, dict):
                source = {**source, "path": ".", "type": None, "options": {}}
            sources.append(source)
        document["data"] = data | {"sources": sources, "store": None, "coefficients": None}
        # The file of the grid (data.grid.like) need not exist.
        if isinstance(data.get("grid"), dict) and "like" in data["grid"]:
            document["data"]["grid"] = data["grid"] | {"like": "."}
    model = document.get("model")
    if isinstance(model, dict):
        # Budget fixers need units and coefficients of the data.
        document["model"] = {key: value for key, value in model.items() if key != "postprocess"}
    return build_config(document, origin=path)


def build_grid(text: str) -> LatLonGrid:
    """Return the global grid of the size ``ROWSxCOLUMNS``. A grid with an odd number of rows includes the poles.

    Raises:
        ConfigError: if the text does not have this form, or a number is below 4.
    """
    from credit.grid import LatLonGrid

    # If the text does not have this form, the sizes are 0, so the error below is raised, as for a grid that is too
    # small.
    rows = columns = 0
    match = re.fullmatch(r"([0-9]+)x([0-9]+)", text)
    if match is not None:
        rows, columns = map(int, match.groups())
    if min(rows, columns) < 4:
        raise ConfigError(f'--grid: "{text}": write ROWSxCOLUMNS, for example 721x1440, each at least 4')
    return LatLonGrid.equiangular(rows, columns, poles=bool(rows % 2))


class TrainingStepBuilder:
    """Builder of the network and the training step of a config, on tensors without memory.

    The class implements the protocol `StepBuilder` of `credit.hpc.planner.planned_run`.

    Args:
        config: config of the run.
        assets: channels, grid and normalization of the run, with dummy values.
    """

    def __init__(self, config: Config, assets: ModelAssets) -> None:
        from credit.losses.build import build_loss_from_context
        from credit.train.build.dry_run import build_placeholder_assets
        from credit.train.build.stepper import build_run_loss_context

        self._config = config
        self._assets = assets
        # The loss contains fields of weights. On the run's grid, they could use gigabytes of memory, so they are
        # computed on a coarse grid and replaced with fake tensors of the correct size. Other constants that depend on
        # the grid, such as spectral tables, cannot be resized and are built for the run's grid.
        if config.loss.depends_on_resolution:
            self._loss_grid = assets.grid
        else:
            self._loss_grid = build_grid(_COARSE_GRID)
        self._loss_context = build_run_loss_context(config, build_placeholder_assets(config, self._loss_grid, {}))
        self._real_loss = build_loss_from_context(config.loss, self._loss_context)
        # A loss that combines values of different cells is computed on whole fields on every rank.
        self.gathers_members = self._real_loss.coupled_dims == {"cells", "channels"}

    def build_network(self, mesh: DeviceGrid, sharded: bool, checkpointing: Checkpointing) -> tuple[nn.Module, bool]:
        """Return the network on the meta device, and True if it uses autocast; see `StepBuilder.build_network`.

        Raises:
            ConfigError: if the network cannot be split over the mesh, or a part of the run cannot use divided fields.
        """
        import torch

        from credit.train.build.domain_support import require_domain_support
        from credit.train.build.model import build_parallel_model

        trainer = self._config.trainer
        parallelism = trainer.parallelism
        if mesh.degrees.domain != parallelism.num_domain_ranks:
            parallelism = parallelism.model_copy(update={"domain": mesh.degrees.domain})
            divided_trainer = trainer.model_copy(update={"parallelism": parallelism})
            require_domain_support(self._config.model_copy(update={"trainer": divided_trainer}))
        if not sharded:
            parallelism = parallelism.model_copy(update={"data": "none"})
        changes = {"parallelism": parallelism, "activation_checkpoint": checkpointing, "compile": False}
        planned_trainer = trainer.model_copy(update=changes)
        config = self._config.model_copy(update={"trainer": planned_trainer})
        return build_parallel_model(config, self._assets, mesh, torch.device("meta"))

    def build_step(
        self, model: nn.Module, autocast: bool, rollout: int, members: MemberBatches, micro_steps: int
    ) -> tuple[torch.optim.Optimizer, Callable[[Callable[[], None]], object]]:
        """Return the optimizer and a function that takes one optimizer step; see `StepBuilder.build_step`."""
        import torch

        from credit.forecast.objectives.base import build_objective
        from credit.train.build.stepper import build_objective_context, build_stepper
        from credit.train.optim import build_optimizer
        from credit.train.step import StepSettings, TrainingStep

        trainer = self._config.trainer
        stepper = build_stepper(self._config, self._assets, model, torch.device("cpu"), autocast)
        optimizer = build_optimizer(model, trainer)
        grid_shape = stepper.domain.part.shape if stepper.domain is not None else self._assets.grid.shape
        loss = self._divide_loss(self._real_loss, stepper.domain, grid_shape)
        context = build_objective_context(self._config, self._assets, stepper, loss)
        context = replace(
            context,
            build_part_losses=partial(self._build_part_losses, stepper.domain, grid_shape),
            members=members.members,
            members_at_once=members.at_once,
        )
        settings = StepSettings(lambda _: rollout, accumulation=micro_steps, grad_max_norm=trainer.grad_max_norm)
        step = TrainingStep(build_objective(trainer.objective, context), optimizer, None, settings)

        def take_step(on_begin: Callable[[], None]) -> object:
            return step(self._zero_batches(rollout, grid_shape, on_begin), 0, trainer.learning_rate)

        return optimizer, take_step

    def _build_part_losses(
        self, domain: Domain | None, grid_shape: tuple[int, int], parts: Sequence[LossPart]
    ) -> list[nn.Module]:
        """Return the loss of each part of the output, see `_divide_loss`.

        Call this method in a `FakeTensorMode`, in which new tensors have no memory.

        Args:
            domain: ranks among which the fields are divided; None if each rank has whole fields.
            grid_shape: number of rows and columns of a rank's fields.
            parts: parts of the output.
        """
        from credit.losses.build import build_loss_from_context

        all_rows = slice(0, self._loss_grid.shape[0])
        losses = []
        for part in parts:
            part_context = self._loss_context.select(part.channels, all_rows)
            part_loss = build_loss_from_context(self._config.loss, part_context)
            losses.append(self._divide_loss(part_loss, domain, (part.rows.stop - part.rows.start, grid_shape[1])))
        return losses

    def _divide_loss(self, loss: Loss, domain: Domain | None, shape: tuple[int, int]) -> nn.Module:
        """Return the loss of one rank, with buffers (..., H, W) of the shape (H, W) of the rank's fields.

        A loss that combines different cells needs whole fields. It gathers them and has buffers of the run's grid.
        """
        from credit.losses.domain_loss import GatheredLoss

        if domain is None or "cells" not in loss.coupled_dims:
            return self._resize_fields(loss, shape)
        return GatheredLoss(self._resize_fields(loss, self._assets.grid.shape), domain)

    def _resize_fields(self, module: nn.Module, shape: tuple[int, int]) -> nn.Module:
        """Return a copy of a module and its submodules with the buffers (..., H, W) resized to `shape`.

        The new buffers have no values, so the copy can only be used to measure memory and collectives.

        Args:
            module: loss on the grid `_loss_grid`. This grid is coarse unless the loss depends on the resolution.
            shape: number of latitude rows and longitude columns of the new buffers.
        """
        # A shallow copy shares the parameters. Buffers and submodules need new dicts.
        resized = copy.copy(module)
        resized._buffers = {}
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.shape[-2:] == self._loss_grid.shape:
                buffer = buffer.new_empty(*buffer.shape[:-2], *shape)
            resized._buffers[name] = buffer
        resized._modules = {}
        for name, child in module._modules.items():
            resized._modules[name] = self._resize_fields(child, shape)
        return resized

    def _zero_batches(self, rollout: int, grid_shape: tuple[int, int], on_begin: Callable[[], None]) -> Iterator[Batch]:
        """Yield batches of zeros endlessly, and call `on_begin` before each batch.

        Args:
            rollout: number of forecast steps of a batch.
            grid_shape: number of rows and columns of a rank's fields.
            on_begin: function that is called before each batch; it marks the beginning of a micro-step.
        """
        import torch

        from credit.data.samples.batch import Batch

        batch_size = self._config.trainer.train_batch_size
        history_len = self._config.data.history_len
        channels = self._assets.channels
        num_prognostic = len(channels.group("prognostic"))
        num_forcing = len(channels.group("dynamic_forcing"))
        # The forcing covers all input frames of the rollout. The last target frame is not an input frame.
        num_input_frames = history_len + rollout - 1
        while True:
            on_begin()
            yield Batch(
                history_BCTHW=torch.zeros(batch_size, num_prognostic, history_len, *grid_shape),
                forcing_BCTHW=torch.zeros(batch_size, num_forcing, num_input_frames, *grid_shape),
                target_BCTHW=torch.zeros(batch_size, len(channels.output), rollout, *grid_shape),
                initial_minutes=(0,) * batch_size,
            )
