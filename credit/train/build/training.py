"""Builder of the trainer of a run from its config.

`assemble_training` states the order: data, assets, model, components, resumed state.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from credit.calendar import parse_duration
from credit.config import Config
from credit.config.batch_division import divide_global_batch
from credit.data.reader import FieldReader
from credit.data.samples.cached_reader import CachedReader
from credit.data.samples.dataset import ForecastDataset
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
from credit.train.checkpoint.resume import find_initial_weights, load_run_state, prepare_start, write_config
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
    """Collective: return the trainer of a run, continued from the checkpoint that ``trainer.resume`` finds.

    Args:
        config: the config of the run.
        process_info: rank and number of ranks of this process.
        device: the device of this process.
        watchdog: the watchdog that notices when a rank hangs.
        draw: function that draws the figures of a preview.
        start_time: `time.perf_counter` when the preparation of the run began; by default now.
        peak_rates: rate -> TFLOP/s of the GPU, see `credit.hpc.planner.gpus.find_peak_rates`; None if unknown.

    Raises:
        ConfigError: if sections of the config contradict each other, or do not fit the data or the number of ranks.
        DataError: if the data do not cover the splits, or their values are not plausible.
        CheckpointError: if the checkpoint to continue from is damaged, or was trained on other channels.
    """
    start_time = start_time or time.perf_counter()
    retain_freed_memory(device)
    use_deterministic_algorithms(config.trainer.deterministic)
    degrees = plan_degrees(config.trainer.parallelism, process_info.world)
    timeout_minutes = parse_duration(config.trainer.parallelism.timeout)
    mesh = build_mesh(degrees, process_info.rank, device.type, timeout_minutes=timeout_minutes)
    require_domain_support(config)
    # Data and assets. The monitor is checked before the statistics are fitted, which can take hours.
    reader, splits = open_training_reader(config)
    config = config.model_copy(update={"model": config.model.resolve(reader.grid.shape)})
    require_measured_monitor(config, reader.channels)
    origin = choose_origin(config, process_info)
    config, assets = prepare_assets(config, reader, splits, mesh, origin)

    # The network, with the weights that a new run begins with.
    model, autocast = build_parallel_model(config, assets, mesh, device)
    fill_model(model, origin, config.seed)
    model.train()

    # Everything around the network, then the state of a resumed run.
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
class Origin:
    """Weights and state that a run begins with.

    Attributes:
        checkpoint: the checkpoint that ``trainer.resume`` finds; None for a run from scratch or from a file of weights.
        resumed: the same checkpoint if the run continues from its step; None if the run begins at step 0.
        base: the checkpoint of another run whose forecast weights this run begins with: those that LoRA adapters adapt,
            or those of the run folder in ``trainer.resume``. None without a base.
        weights: the file of weights that the run begins with; None without such a file.
    """

    checkpoint: Path | None
    resumed: Path | None
    base: Path | None
    weights: Path | None


@dataclass(frozen=True)
class RunSetup:
    """Inputs that the components of a trainer are built from.

    Attributes:
        config: the config of the run, from `prepare_assets`, with the batches of this number of ranks.
        process_info: rank and number of ranks of this process.
        device: the device of this process.
        mesh: this rank's position among the ranks.
        reader: the reader of the data.
        splits: "train", "valid" and "test" -> period.
        assets: the assets of the model.
        origin: the weights and state that the run begins with.
    """

    config: Config
    process_info: ProcessInfo
    device: torch.device
    mesh: DeviceGrid
    reader: FieldReader
    splits: Mapping[str, Split]
    assets: ModelAssets
    origin: Origin


def open_training_reader(config: Config) -> tuple[FieldReader, dict[str, Split]]:
    """Collective: open the data of a run, with the cache of ``data.cache``, and build its splits.

    Raises:
        DataError: if the data are missing or damaged.
    """
    reader, splits = open_training_fields(config)
    if config.data.cache == "memory":
        reader = CachedReader(reader)
    return reader, splits


def choose_origin(config: Config, process_info: ProcessInfo) -> Origin:
    """Collective: return the weights and state that the run begins with.

    With ``trainer.resume: never``, damaged checkpoints of this run are renamed. With other values, the run's STATUS
    becomes ``failed`` if all of its checkpoints are damaged.

    Args:
        config: the config of the run.
        process_info: rank, number of ranks and job of this process.

    Raises:
        ConfigError: if ``trainer.resume`` or ``trainer.lora`` asks for a checkpoint that does not exist.
        CheckpointError: if the checkpoint or the base of its adapters is damaged.
    """
    checkpoint = prepare_start(config, process_info)
    base = choose_base_checkpoint(config, checkpoint)
    # A new run with a base starts from it at step 0. When it is resumed, its own checkpoint is another path than the
    # base.
    starts_from_base = base is not None and checkpoint.resolve() == base
    resumed = None if starts_from_base else checkpoint
    return Origin(checkpoint, resumed, base, find_initial_weights(config, checkpoint))


def prepare_assets(
    config: Config, reader: FieldReader, splits: Mapping[str, Split], mesh: DeviceGrid, origin: Origin
) -> tuple[Config, ModelAssets]:
    """Collective: return the config of the run and the model's assets.

    A continued run uses the assets of its checkpoint; for a new run they are fitted to the training period. A continued
    run also keeps the global batch size of its checkpoint, which may change ``trainer.global_batch_size``.

    Args:
        config: the config as the user wrote it.
        reader: the reader of the data.
        splits: "train" and "valid" -> period.
        mesh: this rank's position among the ranks.
        origin: the checkpoint or weights that the run begins with.

    Raises:
        CheckpointError: if the checkpoint was trained on other channels.
        DataError: if values of the data are not plausible, or in other units than the checkpoint was trained on.
    """

    def fit_run_assets() -> ModelAssets:
        # Rank 0 alone reads the training period; the result is sent to the other ranks.
        return run_on_rank0(lambda: fit_assets(config, reader, splits["train"]))

    if origin.checkpoint is not None:
        is_continuation = origin.resumed is not None
        config, assets = load_run_state(config, reader, mesh, origin.checkpoint, is_continuation, fit_run_assets)
    else:
        assets = fit_run_assets()
        if origin.weights is not None:
            assets = adapt_assets_to_weights(config, assets, reader, origin.weights)
    return config, assets.with_trained_periods((splits["train"], splits["valid"]), reader.calendar)


def fill_model(model: nn.Module, origin: Origin, seed: int) -> None:
    """Collective: fill a model with the weights that the run begins with, except those of a resumed checkpoint.

    Args:
        model: the model, with memory and without values.
        origin: the weights and state that the run begins with. If it has none, the weights are drawn at random.
        seed: the seed of weights that are drawn.
    """
    if origin.base is not None:
        # A resumed run of adapters needs the base as well, because its checkpoint contains only the adapters.
        load_base(model, origin.base, seed)
    elif origin.resumed is not None:
        # `Trainer.load` loads all weights.
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
        autocast: whether the model computes under bfloat16 autocast.
        watchdog: the watchdog that notices when a rank hangs.
        draw: function that draws the figures of a preview.
        start_time: `time.perf_counter` when the preparation of the run began.
        peak_rates: rate -> TFLOP/s of the GPU; empty if unknown.

    Raises:
        DataError: if no sample fits into the training or the validation period.
    """
    config, assets, device, mesh = setup.config, setup.assets, setup.device, setup.mesh

    # Components of a step: rollout and loss, update of the weights and of their average.
    stepper = build_stepper(config, assets, model, device, autocast)
    objective = build_run_objective(config, assets, stepper, device, mesh)
    optimizer = build_optimizer(model, config.trainer)
    average = EMA(model, config.trainer.ema_decay) if config.trainer.use_ema else None

    # The samples of each step, the number of steps, and the length of their rollouts.
    frames = build_frame_reader(config, setup.reader, assets, stepper.domain)
    schedule = build_sample_schedule(config, frames, setup.splits["train"], mesh)
    total_steps = config.trainer.max_steps or config.trainer.num_epoch * schedule.steps_per_epoch
    forecast_len = build_forecast_len(config, total_steps)

    # Validation and previews score with the same weights of the cells.
    valid = setup.splits["valid"]
    weight_CHW = compute_cell_weights(assets, device, stepper.domain)
    run_validation = build_validation(config, assets, objective, frames, valid, forecast_len, weight_CHW, mesh)
    return TrainingComponents(
        config=config,
        launch=setup.process_info,
        mesh=mesh,
        assets=assets,
        calendar=setup.reader.calendar,
        device=device,
        model=model,
        optimizer=optimizer,
        average=average,
        training_step=build_step(config, objective, optimizer, average, forecast_len, mesh.data_rank),
        order=schedule,
        total_steps=total_steps,
        watchdog=watchdog,
        meter=build_usage_meter(config, assets, device, mesh, schedule.samples_a_step, peak_rates, start_time),
        validate=run_validation,
        preview=build_preview(config, frames, valid, stepper, weight_CHW, mesh, draw),
        base=_describe_adapter_base(setup),
    )


def _describe_adapter_base(setup: RunSetup) -> dict[str, str] | None:
    """Return the description of the base that adapters need again, None for a run that trains all weights."""
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
        mesh: this rank's position among the ranks; None for one rank that computes all members.
    """
    loss = build_run_loss(config, assets, device, stepper.domain)
    return build_objective(config.trainer.objective, build_objective_context(config, assets, stepper, loss, mesh))


def build_sample_schedule(config: Config, frames: FrameReader, split: Split, mesh: DeviceGrid) -> SampleSchedule:
    """Return the schedule of the samples that this rank takes at each step.

    Args:
        config: the config of the run.
        frames: reader of initial states, forcing and targets.
        split: the training period.
        mesh: this rank's position among the ranks.

    Raises:
        DataError: if no sample fits into the period.
    """
    data = config.data
    reader = frames.reader
    initial_times = require_samples(reader.times, split, reader.calendar, data, data.forecast_len)
    # One rank of those that work on a sample reads and broadcasts; the others hold placeholders and need no workers.
    placeholder = not mesh.reads_samples
    num_workers = 0 if placeholder else data.num_workers
    dataset = ForecastDataset(
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


def build_forecast_len(config: Config, total_steps: int) -> Callable[[int], int]:
    """Return the function that maps an optimizer step (from 0) to the number of rollout steps in training.

    Args:
        config: the config of the run.
        total_steps: number of optimizer steps of the run, over which rollouts may grow longer.
    """
    return functools.partial(
        forecast_len_at,
        total=total_steps,
        forecast_len=config.data.forecast_len,
        ramp=config.trainer.forecast_len_from,
    )


def build_step(
    config: Config,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    average: EMA | None,
    forecast_len: Callable[[int], int],
    data_rank: int,
) -> TrainingStep:
    """Return the object that takes the run's optimizer steps.

    Args:
        config: the config of the run.
        objective: the training objective, which runs the model and returns the loss.
        optimizer: the optimizer of the model's trainable parameters.
        average: the moving average of these parameters, None for none.
        forecast_len: function that maps an optimizer step (from 0) to the number of rollout steps.
        data_rank: the data rank of this process, which seeds its random numbers.
    """
    settings = StepSettings(
        forecast_len=forecast_len,
        seed=config.seed,
        accumulation=config.trainer.grad_accum_every,
        grad_max_norm=config.trainer.grad_max_norm,
        counted_steps=config.trainer.backprop_on_timestep,
        data_rank=data_rank,
    )
    return TrainingStep(objective, optimizer, average, settings)
