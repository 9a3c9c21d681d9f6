"""Builder of the trainer of a run from its config.

`assemble_training` builds data, assets, model and components in this order, and then loads the state of a resumed run.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from credit.config import Config
from credit.config.batch_division import divide_global_batch
from credit.data.reader import FieldReader
from credit.data.samples.cached_reader import CachedReader
from credit.data.samples.dataset import SampleDataset
from credit.data.samples.frames import FrameReader
from credit.data.samples.loader import SampleSchedule
from credit.data.splits import Split, require_samples
from credit.forecast.objectives.base import Objective, build_objective
from credit.forecast.stepper import Stepper
from credit.models.initialise import initial_values
from credit.parallel.mesh import DeviceGrid, build_mesh, plan_degrees
from credit.parallel.object_collectives import run_on_rank0
from credit.parallel.process_info import ProcessInfo
from credit.parallel.state.materialise import fill_, require_filled
from credit.parallel.watchdog import Watchdog
from credit.train.build.assets import ModelAssets, fit_assets
from credit.train.build.components import TrainingComponents
from credit.train.build.domain_support import require_domain_support
from credit.train.build.fine_tuning import choose_base_checkpoint, describe_base, load_base
from credit.train.build.model import build_parallel_model, use_deterministic_algorithms
from credit.train.build.open_data import build_frame_reader, open_training_fields
from credit.train.build.stepper import build_objective_context, build_run_loss, build_stepper, compute_cell_weights
from credit.train.build.validation import build_validation, require_measured_monitor
from credit.train.checkpoint.external_weights import adapt_assets_to_weights, load_weights_file
from credit.train.checkpoint.resume import find_weights_file, load_run_state, prepare_start, write_config
from credit.train.ema import EMA
from credit.train.monitor.preview import DrawPreview, build_preview
from credit.train.monitor.usage import build_usage_meter
from credit.train.optim import build_optimizer, forecast_len_at
from credit.train.step import StepSettings, TrainingStep
from credit.train.trainer import Trainer
from credit.utils.malloc import retain_freed_memory


def assemble_training(
    config: Config,
    process_info: ProcessInfo,
    device: torch.device,
    watchdog: Watchdog,
    draw: DrawPreview,
    start_time: float | None = None,
    peak_rates: Mapping[str, float] | None = None,
) -> Trainer:
    """Collective: return the trainer of a run, with the state of the checkpoint that ``trainer.resume`` selects.

    Args:
        config: the config of the run.
        process_info: rank and number of ranks of this process.
        device: the device of this process.
        watchdog: the watchdog that detects when a rank hangs.
        draw: function that plots a preview, see `DrawPreview`.
        start_time: `time.perf_counter` when the preparation of the run began; by default the current time.
        peak_rates: precision -> TFLOP/s of the GPU, see `credit.hpc.planner.gpus.find_peak_rates`; None if unknown.

    Raises:
        ConfigError: if sections of the config contradict each other, or do not fit the data or the number of ranks.
        DataError: if the data do not cover the splits, or their values are not plausible.
        CheckpointError: if the checkpoint to continue from is damaged, or was trained on different channels.
    """
    start_time = start_time or time.perf_counter()
    retain_freed_memory(device)
    use_deterministic_algorithms(config.trainer.deterministic)
    degrees = plan_degrees(config.trainer.parallelism, process_info.world)
    mesh = build_mesh(degrees, process_info.rank, device.type)
    require_domain_support(config)
    # Data and assets. The monitor is checked before the statistics are computed, because that can take hours.
    reader, splits = open_training_reader(config)
    config = config.model_copy(update={"model": config.model.resolve(reader.grid.shape)})
    require_measured_monitor(config, reader.channels)
    origin = choose_origin(config, process_info)
    config, assets = prepare_assets(config, reader, splits, mesh, origin)

    # The network, with the initial weights of a new run.
    model, autocast = build_parallel_model(config, assets, mesh, device)
    fill_model(model, origin, config.seed)
    model.train()

    # The other components of the trainer, and then the state of a resumed run.
    divided_config = divide_global_batch(config, mesh.num_sample_ranks)
    setup = RunSetup(divided_config, process_info, device, mesh, reader, splits, assets, origin)
    components = build_components(setup, model, autocast, watchdog, draw, start_time, peak_rates or {})
    trainer = Trainer(components)
    if origin.resumed is not None:
        trainer.load(origin.resumed)
    require_filled(model)
    if process_info.is_main:
        write_config(config, Path(config.save_loc))
    return trainer


@dataclass(frozen=True)
class RunOrigin:
    """Origin of the weights and the state that a run starts with.

    Attributes:
        checkpoint: the checkpoint that ``trainer.resume`` selects; None for random weights or a file of weights.
        resumed: the same checkpoint if the run continues from its step; None if the run starts at step 0.
        base: the checkpoint whose forecast weights the run starts with: the base of LoRA adapters, or the best
            checkpoint of the run folder in ``trainer.resume``. None without a base.
        weights: the file of weights that the run starts with; None without a file.
    """

    checkpoint: Path | None
    resumed: Path | None
    base: Path | None
    weights: Path | None


@dataclass(frozen=True)
class RunSetup:
    """Inputs that the components of a trainer are built from.

    Attributes:
        config: the config of the run from `prepare_assets`, with the batch sizes for this number of ranks.
        process_info: rank and number of ranks of this process.
        device: the device of this process.
        mesh: position of this rank in the device mesh.
        reader: the reader of the data.
        splits: "train", "valid" and "test" -> period.
        assets: the assets of the model.
        origin: origin of the weights and the state that the run starts with.
    """

    config: Config
    process_info: ProcessInfo
    device: torch.device
    mesh: DeviceGrid
    reader: FieldReader
    splits: Mapping[str, Split]
    assets: ModelAssets
    origin: RunOrigin


def open_training_reader(config: Config) -> tuple[FieldReader, dict[str, Split]]:
    """Collective: open the data of a run, with the cache of ``data.cache``, and build its splits.

    Raises:
        DataError: if the data are missing or damaged.
    """
    reader, splits = open_training_fields(config)
    if config.data.cache == "memory":
        reader = CachedReader(reader)
    return reader, splits


def choose_origin(config: Config, process_info: ProcessInfo) -> RunOrigin:
    """Collective: return the origin of the weights and the state that the run starts with.

    With ``trainer.resume: never``, damaged checkpoints of this run are renamed. With other values, the run's STATUS
    becomes ``failed`` if all checkpoints of the run are damaged.

    Args:
        config: the config of the run.
        process_info: rank, number of ranks and job of this process.

    Raises:
        ConfigError: if ``trainer.resume`` or ``trainer.lora`` requires a checkpoint that does not exist.
        CheckpointError: if the checkpoint or the base of its adapters is damaged.
    """
    checkpoint = prepare_start(config, process_info)
    base = choose_base_checkpoint(config, checkpoint)
    # A new run with a base starts at step 0, and `checkpoint` is the base. For a resumed run, `checkpoint` differs from
    # the base.
    starts_from_base = base is not None and checkpoint.resolve() == base
    resumed = None if starts_from_base else checkpoint
    return RunOrigin(checkpoint, resumed, base, find_weights_file(config, checkpoint))


def prepare_assets(
    config: Config, reader: FieldReader, splits: Mapping[str, Split], mesh: DeviceGrid, origin: RunOrigin
) -> tuple[Config, ModelAssets]:
    """Collective: return the config of the run and the model's assets.

    A resumed run uses the assets of its checkpoint. For a new run, the assets are computed from the training period. A
    resumed run also keeps the global batch size of its checkpoint, which may change ``trainer.global_batch_size``.

    Args:
        config: the config of the user.
        reader: the reader of the data.
        splits: "train" and "valid" -> period.
        mesh: position of this rank in the device mesh.
        origin: origin of the weights and the state that the run starts with.

    Raises:
        CheckpointError: if the checkpoint was trained on different channels.
        DataError: if values of the data are not plausible, or the units differ from the units of the checkpoint.
    """

    def fit_run_assets() -> ModelAssets:
        # Only rank 0 reads the training period; the result is sent to the other ranks.
        return run_on_rank0(lambda: fit_assets(config, reader, splits["train"]))

    if origin.checkpoint is not None:
        is_continuation = origin.resumed is not None
        config, assets = load_run_state(config, reader, mesh, origin.checkpoint, is_continuation, fit_run_assets)
    else:
        assets = fit_run_assets()
        if origin.weights is not None:
            assets = adapt_assets_to_weights(config, assets, reader, origin.weights)
    return config, assets.with_trained_periods((splits["train"], splits["valid"]), reader.calendar)


def fill_model(model: nn.Module, origin: RunOrigin, seed: int) -> None:
    """Collective: fill a model with the initial weights of the run; `Trainer.load` loads a resumed checkpoint later.

    Args:
        model: the model, whose parameters have allocated memory but no values.
        origin: origin of the weights. If it contains no weights, the weights are initialised at random.
        seed: the seed of random weights.
    """
    if origin.base is not None:
        # A resumed run of adapters needs the base as well, because its checkpoint contains only the adapters.
        load_base(model, origin.base, seed)
    elif origin.resumed is not None:
        # `Trainer.load` loads all weights later.
        pass
    elif origin.weights is not None:
        load_weights_file(model, origin.weights, seed)
    else:
        fill_(model, initial_values(model, seed))


def build_components(
    setup: RunSetup,
    model: nn.Module,
    autocast: bool,
    watchdog: Watchdog,
    draw: DrawPreview,
    start_time: float,
    peak_rates: Mapping[str, float],
) -> TrainingComponents:
    """Collective on GPUs: return the components of a trainer, at step 0.

    Args:
        setup: config, data, assets and ranks of the run.
        model: the model of this rank.
        autocast: True if the model computes under bfloat16 autocast.
        watchdog: the watchdog that detects when a rank hangs.
        draw: function that plots a preview, see `DrawPreview`.
        start_time: `time.perf_counter` when the preparation of the run began.
        peak_rates: precision -> TFLOP/s of the GPU; empty if unknown.

    Raises:
        DataError: if no sample fits into the training or the validation period.
    """
    config, assets, device, mesh = setup.config, setup.assets, setup.device, setup.mesh

    # Components of a step: rollout and loss, update of the weights and of their moving average.
    stepper = build_stepper(config, assets, model, device, autocast)
    objective = build_run_objective(config, assets, stepper, device, mesh)
    optimizer = build_optimizer(model, config.trainer)
    average = EMA(model, config.trainer.ema_decay) if config.trainer.use_ema else None

    # The samples of each step, the number of steps, and the length of the rollouts.
    frames = build_frame_reader(config, setup.reader, assets, stepper.domain)
    schedule = build_sample_schedule(config, frames, setup.splits["train"], mesh)
    total_steps = config.trainer.max_steps or config.trainer.num_epoch * schedule.steps_per_epoch
    forecast_len = build_forecast_len_schedule(config, total_steps)

    # Validation and previews use the same cell weights.
    valid = setup.splits["valid"]
    weight_CHW = compute_cell_weights(assets, device, stepper.domain)
    run_validation = build_validation(config, assets, objective, frames, valid, forecast_len, weight_CHW, mesh)
    return TrainingComponents(
        config=config,
        process_info=setup.process_info,
        mesh=mesh,
        assets=assets,
        calendar=setup.reader.calendar,
        device=device,
        model=model,
        optimizer=optimizer,
        average=average,
        training_step=build_training_step(config, objective, optimizer, average, forecast_len, mesh.data_rank),
        sample_schedule=schedule,
        total_steps=total_steps,
        watchdog=watchdog,
        meter=build_usage_meter(config, assets, device, mesh, schedule.samples_per_step, peak_rates, start_time),
        validate=run_validation,
        preview=build_preview(config, frames, valid, stepper, weight_CHW, mesh, draw),
        base=_describe_adapter_base(setup),
    )


def _describe_adapter_base(setup: RunSetup) -> dict[str, str] | None:
    """Return the description of the base of adapters for meta.json; None for a run that trains all weights."""
    if setup.config.trainer.lora is None:
        return None
    return describe_base(setup.origin.base)


def build_run_objective(
    config: Config, assets: ModelAssets, stepper: Stepper, device: torch.device, mesh: DeviceGrid | None = None
) -> Objective:
    """Return the training objective of ``trainer.objective``, with the loss of ``loss`` on `device`.

    Args:
        config: the config of the run.
        assets: channels, grid, statistics and masks of the model.
        stepper: stepper of the network.
        device: the device of the network.
        mesh: position of this rank in the device mesh; None for a single rank that computes all members.
    """
    loss = build_run_loss(config, assets, device, stepper.domain)
    return build_objective(config.trainer.objective, build_objective_context(config, assets, stepper, loss, mesh))


def build_sample_schedule(config: Config, frames: FrameReader, split: Split, mesh: DeviceGrid) -> SampleSchedule:
    """Return the schedule of the samples that this rank uses at each step.

    Args:
        config: the config of the run.
        frames: reader of initial states, forcing and targets.
        split: the training period.
        mesh: position of this rank in the device mesh.

    Raises:
        DataError: if no sample fits into the period.
    """
    data = config.data
    reader = frames.reader
    initial_times = require_samples(reader.times, split, reader.calendar, data, data.forecast_len)
    # Of the ranks that work on a sample, one rank reads and broadcasts. The others have placeholders and no workers.
    placeholder = not mesh.reads_samples
    num_workers = 0 if placeholder else data.num_workers
    dataset = SampleDataset(
        frames, initial_times, data.step_minutes, data.history_len, data.forecast_len, placeholder=placeholder
    )
    return SampleSchedule(
        dataset,
        config.trainer.train_batch_size,
        config.trainer.grad_accum_every,
        config.seed,
        num_workers,
        sample_group_index=mesh.sample_rank,
        num_sample_groups=mesh.num_sample_ranks,
    )


def build_forecast_len_schedule(config: Config, total_steps: int) -> Callable[[int], int]:
    """Return the function that maps an optimizer step (from 0) to the number of rollout steps in training.

    Args:
        config: the config of the run.
        total_steps: number of optimizer steps of the run; the rollout length may depend on the fraction of the run.
    """
    return functools.partial(
        forecast_len_at,
        total=total_steps,
        forecast_len=config.data.forecast_len,
        ramp=config.trainer.forecast_len_from,
    )


def build_training_step(
    config: Config,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    average: EMA | None,
    forecast_len: Callable[[int], int],
    data_rank: int,
) -> TrainingStep:
    """Return the `TrainingStep` that computes the optimizer steps of the run.

    Args:
        config: the config of the run.
        objective: the training objective, which runs the model and returns the loss.
        optimizer: the optimizer of the model's trainable parameters.
        average: the moving average of these parameters; None if the run has no moving average.
        forecast_len: function that maps an optimizer step (from 0) to the number of rollout steps.
        data_rank: the data-parallel rank of this process, which seeds its random numbers.
    """
    settings = StepSettings(
        forecast_len=forecast_len,
        seed=config.seed,
        accumulation=config.trainer.grad_accum_every,
        grad_max_norm=config.trainer.grad_max_norm,
        loss_steps=config.trainer.backprop_on_timestep,
        data_rank=data_rank,
    )
    return TrainingStep(objective, optimizer, average, settings)
