"""Builds the trainer of a run from its config."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from credit.channels import Channel, ChannelMap
from credit.config import Config
from credit.data.normalize import Normalizer
from credit.data.reader import FieldReader
from credit.data.samples.cached_reader import CachedReader
from credit.data.samples.dataset import ForecastDataset
from credit.data.samples.forcing import fixed_statistics
from credit.data.samples.frames import FrameReader
from credit.data.samples.loader import Loader, SampleSchedule
from credit.data.splits import Split, require_samples
from credit.errors import ConfigError, did_you_mean
from credit.forecast.objectives.base import Objective, ObjectiveContext, build_objective
from credit.forecast.postprocess.base import PostprocessContext, build_postprocess
from credit.forecast.stepper import Stepper
from credit.losses.base import Loss
from credit.losses.build import build_loss
from credit.metrics import Metric, MetricContext, metric_class
from credit.models.initialise import initial_values
from credit.parallel.mesh import DeviceGrid, build_mesh, plan_degrees
from credit.parallel.object_collectives import run_on_rank0
from credit.parallel.process_info import ProcessInfo
from credit.parallel.state.materialise import fill_, require_filled
from credit.parallel.watchdog import Watchdog
from credit.train.build.assets import ModelAssets, fit_assets
from credit.train.build.components import TrainingComponents
from credit.train.build.fine_tuning import describe_base, find_base, load_base
from credit.train.build.model import build_parallel_model, use_deterministic_algorithms
from credit.train.build.open_data import open_training_fields
from credit.train.checkpoint.external_weights import assets_for_weights, load_weights
from credit.train.checkpoint.resume import choose_start, find_initial_weights, load_run_state, write_config
from credit.train.ema import EMA
from credit.train.monitor.preview import DrawPreview, build_preview
from credit.train.monitor.usage import build_meter
from credit.train.optim import build_optimizer, forecast_len_at
from credit.train.prefetch import DevicePrefetcher
from credit.train.step import StepSettings, TrainingStep
from credit.train.trainer import Trainer
from credit.train.validate import ValidationShare, evenly_spaced, shard_cases, validate
from credit.utils.malloc import retain_freed_memory


def build_normalizer(config: Config, assets: ModelAssets) -> Normalizer:
    """Return the normaliser of a run.

    Computed channels have fixed statistics, and masks stay 0 or 1.
    """
    fixed: dict[str, tuple[float, float]] = {}
    for channel in assets.channels.input:
        if channel.source == "mask":
            fixed[channel.name] = (0.0, 1.0)
        elif channel.source == "computed":
            fixed[channel.name] = fixed_statistics(channel.name, config.data.step_minutes, config.data.solar)
    return Normalizer(assets.channels, assets.statistics, fixed, config.data.transforms)


def build_stepper(config: Config, assets: ModelAssets, model: nn.Module, device: torch.device, amp: bool) -> Stepper:
    """Return the stepper of a network that is already on `device`."""
    normalizer = build_normalizer(config, assets).to(device)
    static_CHW = torch.from_numpy(np.ascontiguousarray(assets.static_CHW)).to(device)
    valid_CHW = valid_cells(assets, assets.channels.group("prognostic"))
    context = postprocess_context(config, assets, normalizer, device)
    return Stepper(
        model,
        assets.channels,
        normalizer,
        static_CHW,
        config.model.residual,
        None if valid_CHW.all() else torch.from_numpy(valid_CHW).to(device),
        amp,
        build_postprocess(config.model.postprocess_entries, context),
    )


def postprocess_context(
    config: Config, assets: ModelAssets, normalizer: Normalizer, device: torch.device
) -> PostprocessContext:
    """Return what the run's post-processes are built from."""
    return PostprocessContext(
        data=config.data,
        channels=assets.channels,
        grid=assets.grid,
        attributes=assets.attributes,
        masks=assets.masks,
        static_CHW=assets.static_CHW,
        layers=assets.layers,
        normalizer=normalizer,
        device=device,
    )


def build_run_loss(config: Config, assets: ModelAssets, device: torch.device) -> Loss:
    """Return the training loss on `device`."""
    scale = build_normalizer(config, assets).tendency_scale_C.numpy()
    return build_loss(config.loss, assets.channels, assets.grid, scale, assets.masks).to(device)


def valid_cells(assets: ModelAssets, channels: Sequence[Channel]) -> np.ndarray:
    """Return (C, H, W) bool, False where a channel is always missing."""
    nowhere_HW = np.zeros(assets.grid.shape, dtype=bool)
    return np.stack([~assets.masks.get(channel.variable, nowhere_HW) for channel in channels])


def cell_weights(assets: ModelAssets, device: torch.device) -> torch.Tensor:
    """Return (C_out, H, W) area weights over the cells that count, summing to 1 over each channel, float64."""
    valid_CHW = valid_cells(assets, assets.channels.output)
    return torch.from_numpy(assets.grid.masked_area_weights(valid_CHW)).to(device)


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
        config: of the run.
        process_info: rank and world size.
        device: of this process.
        watchdog: notices when a rank hangs.
        draw: draws the preview's figures.
        start_time: when the preparation of the run began (`time.perf_counter`); default: now.
        peak_rates: of the GPU, see `credit.hpc.planner.gpus.reported_peaks`.
    """
    start_time = time.perf_counter() if start_time is None else start_time
    retain_freed_memory(device)
    use_deterministic_algorithms(config.trainer.deterministic)
    degrees = plan_degrees(config.trainer.parallelism, process_info.world)
    mesh = build_mesh(degrees, process_info.rank, device.type)
    reader, splits = open_training_fields(config)
    if config.data.cache == "memory":
        reader = CachedReader(reader)
    require_monitor(config, reader.channels)

    origin = choose_origin(config, process_info)
    config, assets = prepare_assets(config, reader, splits, mesh, origin)
    model, autocast = build_parallel_model(config, assets, mesh, device)
    # A resumed run loads all weights below, except the base under its adapters.
    if origin.resumed is None or origin.base is not None:
        fill_model(model, origin, config.seed)
    model.train()

    trainer_config = config.trainer
    stepper = build_stepper(config, assets, model, device, autocast)
    loss = build_run_loss(config, assets, device)
    context = ObjectiveContext(stepper, loss, trainer_config.recompute_steps)
    objective = build_objective(trainer_config.objective, context)
    optimizer = build_optimizer(model, trainer_config)
    average = EMA(model, trainer_config.ema_decay) if trainer_config.use_ema else None
    frames = FrameReader(reader, config.data, assets.climatology)
    schedule = build_training_order(config, frames, reader, splits["train"], mesh)
    total_steps = trainer_config.max_steps or trainer_config.num_epoch * schedule.steps_per_epoch
    forecast_len = build_forecast_len(config, total_steps)
    valid_loader, share = build_valid_loader(config, frames, reader, splits["valid"], mesh)
    weight_CHW = cell_weights(assets, device)

    def run_validation(step: int, stop: Callable[[], bool]) -> dict[str, float] | None:
        metrics = build_metrics(config, assets, weight_CHW)
        with DevicePrefetcher(valid_loader, device, mesh.tensor_group) as batches:
            # The loss is averaged over as many steps as the last training step had.
            return validate(objective, batches, share, metrics, forecast_len(step - 1), stop)

    trainer = Trainer(
        TrainingComponents(
            config=config,
            launch=process_info,
            mesh=mesh,
            assets=assets,
            calendar=reader.calendar,
            device=device,
            model=model,
            optimizer=optimizer,
            average=average,
            training_step=build_step(config, objective, optimizer, average, forecast_len, mesh.data_rank),
            order=schedule,
            total_steps=total_steps,
            watchdog=watchdog,
            meter=build_meter(config, assets, device, mesh, schedule.samples_a_step, peak_rates or {}, start_time),
            validate=run_validation,
            preview=build_preview(config, frames, splits["valid"], stepper, weight_CHW, mesh, draw),
            base=describe_base(origin.base) if origin.base is not None else None,
        )
    )
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
        checkpoint: the checkpoint that ``trainer.resume`` finds; None for a run from scratch or from weights.
        resumed: the same checkpoint if the run continues it; None for new adapters, which begin at step 0 on it.
        base: the checkpoint with the frozen weights under LoRA adapters; None if all weights train.
        weights: a file of weights to begin with.
    """

    checkpoint: Path | None
    resumed: Path | None
    base: Path | None
    weights: Path | None


def choose_origin(config: Config, process_info: ProcessInfo) -> Origin:
    """Collective: return what the run begins with."""
    path = choose_start(config, process_info)
    base = find_base(config, path)
    # Adapters begin at step 0 of their own run.
    is_resumed = base is None or path.resolve() != base
    return Origin(path, path if is_resumed else None, base, find_initial_weights(config, path))


def prepare_assets(
    config: Config, reader: FieldReader, splits: Mapping[str, Split], mesh: DeviceGrid, origin: Origin
) -> tuple[Config, ModelAssets]:
    """Collective: return the config of the run and the model's assets.

    A checkpoint keeps its global batch, which may change the config's accumulation.
    """
    if origin.checkpoint is not None:
        config, assets = load_run_state(config, reader, mesh, origin.checkpoint, goes_on=origin.resumed is not None)
    else:
        assets = run_on_rank0(lambda: fit_assets(config, reader, splits["train"]))
        if origin.weights is not None:
            assets = assets_for_weights(config, assets, reader, origin.weights)
    return config, assets.after((splits["train"], splits["valid"]), reader.calendar)


def fill_model(model: nn.Module, origin: Origin, seed: int) -> None:
    """Fill a model: with the base of new adapters, with the weights in a file, or with random values of the seed."""
    if origin.base is not None:
        load_base(model, origin.base, seed)
    elif origin.weights is not None:
        load_weights(model, origin.weights)
    else:
        fill_(model, initial_values(model, seed))


def build_forecast_len(config: Config, total_steps: int) -> Callable[[int], int]:
    """Return the function optimizer step -> number of rollout steps in training."""
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
    """Return the object that takes the run's optimizer steps."""
    settings = StepSettings(
        forecast_len=forecast_len,
        seed=config.seed,
        accumulation=config.trainer.grad_accum_every,
        grad_max_norm=config.trainer.grad_max_norm,
        counted_steps=config.trainer.backprop_on_timestep,
        data_rank=data_rank,
    )
    return TrainingStep(objective, optimizer, average, settings)


def build_training_order(
    config: Config, frames: FrameReader, reader: FieldReader, split: Split, mesh: DeviceGrid
) -> SampleSchedule:
    """Return the schedule of the samples that this rank takes at each step."""
    data = config.data
    initial_times = require_samples(reader.times, split, reader.calendar, data, data.forecast_len)
    # The first of the tensor-parallel peers reads and broadcasts; the others hold placeholders.
    placeholder = mesh.tensor_rank > 0
    dataset = ForecastDataset(
        frames, initial_times, data.step_minutes, data.history_len, data.forecast_len, placeholder=placeholder
    )
    return SampleSchedule(
        dataset,
        config.trainer.train_batch_size,
        config.trainer.grad_accum_every,
        config.seed,
        0 if placeholder else data.num_workers,
        data_rank=mesh.data_rank,
        num_data_ranks=mesh.num_data_ranks,
    )


def build_valid_loader(
    config: Config, frames: FrameReader, reader: FieldReader, split: Split, mesh: DeviceGrid
) -> tuple[Loader, ValidationShare]:
    """Return this rank's share of initial times over the whole of `split`, with the forcing that a forecast has."""
    data = config.data
    possible_times = require_samples(reader.times, split, reader.calendar, data, data.valid_forecast_len)
    initial_times = evenly_spaced(possible_times, config.trainer.valid_samples)
    dataset = ForecastDataset(
        frames,
        initial_times,
        data.step_minutes,
        data.history_len,
        data.valid_forecast_len,
        as_forecast=True,
        placeholder=mesh.tensor_rank > 0,
    )
    share = shard_cases(len(initial_times), config.trainer.valid_batch_size, mesh.data_rank, mesh.num_data_ranks)
    return Loader(dataset, share.batches, workers=0), share


def validation_hours(config: Config) -> list[float]:
    """Return the lead times of the validation in hours."""
    return [(number + 1) * config.data.step_minutes / 60 for number in range(config.data.valid_forecast_len)]


def build_metrics(config: Config, assets: ModelAssets, weight_CHW: torch.Tensor) -> list[Metric]:
    """Return new metrics, with nothing accumulated."""
    context = MetricContext(assets.channels, weight_CHW, validation_hours(config))
    return [metric_class(name)(context) for name in config.trainer.metrics]


def require_monitor(config: Config, channels: ChannelMap) -> None:
    """Refuse a ``trainer.monitor`` that the validation does not measure.

    Raises:
        ConfigError: also for an unknown name in ``trainer.metrics``.
    """
    measured = ["loss"]
    for name in config.trainer.metrics:
        measured += metric_class(name).names(channels, validation_hours(config))
    monitor = config.trainer.monitor
    if monitor not in measured:
        raise ConfigError(f'trainer.monitor: "{monitor}" is not measured{did_you_mean(monitor, measured)}')
