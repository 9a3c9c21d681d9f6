"""Puts a run together. The one file that knows every room; the parts know nothing of the whole config."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
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
from credit.train.assets import ModelAssets, fit_assets
from credit.train.build_model import build_parallel_model, use_deterministic_algorithms
from credit.train.checkpoint.external_weights import assets_for_weights, load_weights
from credit.train.checkpoint.resume import choose_start, find_initial_weights, load_run_state, write_config
from credit.train.ema import EMA
from credit.train.fine_tuning import describe_base, find_base, load_base
from credit.train.monitor.preview import DrawPreview, build_preview
from credit.train.monitor.usage import build_meter
from credit.train.open_data import open_training_fields
from credit.train.optim import build_optimizer, forecast_len_at
from credit.train.prefetch import DevicePrefetcher
from credit.train.step import StepSettings, TrainingStep
from credit.train.trainer import Trainer, TrainingComponents
from credit.train.validate import ValidationShare, evenly_spaced, shard_cases, validate
from credit.utils.malloc import retain_freed_memory


def build_normalizer(config: Config, assets: ModelAssets) -> Normalizer:
    """Return the normaliser; computed channels have fixed statistics and masks are 0 or 1 as they are."""
    fixed = {c.name: (0.0, 1.0) for c in assets.channels.input if c.source == "mask"}
    for channel in assets.channels.input:
        if channel.source == "computed":
            fixed[channel.name] = fixed_statistics(channel.name, config.data.step_minutes, config.data.solar)
    return Normalizer(assets.channels, assets.statistics, fixed, config.data.transforms)


def build_stepper(config: Config, assets: ModelAssets, model: nn.Module, device: torch.device, amp: bool) -> Stepper:
    """Return the stepper of a network that is already on `device`."""
    normalizer = build_normalizer(config, assets).to(device)
    static = torch.from_numpy(np.ascontiguousarray(assets.static_CHW)).to(device)
    cells = valid_cells(assets, assets.channels.group("prognostic"))
    return Stepper(
        model,
        assets.channels,
        normalizer,
        static,
        config.model.residual,
        None if cells.all() else torch.from_numpy(cells).to(device),
        amp,
        build_postprocess(config.model.postprocess_entries, postprocess_context(config, assets, normalizer, device)),
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
    everywhere = np.ones(assets.grid.shape, dtype=bool)
    return np.stack([~assets.masks[c.variable] if c.variable in assets.masks else everywhere for c in channels])


def cell_weights(assets: ModelAssets, device: torch.device) -> torch.Tensor:
    """Return (C_out, H, W) area weights over the cells that count, summing to 1 over each channel, float64."""
    weights = valid_cells(assets, assets.channels.output) * assets.grid.area_weights()
    return torch.from_numpy(weights / weights.sum(axis=(1, 2), keepdims=True)).to(device)


def assemble_training(
    config: Config,
    launch: ProcessInfo,
    device: torch.device,
    watchdog: Watchdog,
    draw: DrawPreview,
    began: float | None = None,
    peaks: Mapping[str, float] | None = None,
) -> Trainer:
    """Return the trainer of a run, continued from the checkpoint that ``trainer.resume`` finds; collective.

    `began`: start of this part (`time.perf_counter`; default: now); `peaks`: see
    `credit.hpc.planner.gpus.reported_peaks`.
    """
    data, began = config.data, time.perf_counter() if began is None else began
    retain_freed_memory(device)
    use_deterministic_algorithms(config.trainer.deterministic)
    mesh = build_mesh(plan_degrees(config.trainer.parallelism, launch.world), launch.rank, device.type)
    reader, splits = open_training_fields(config)
    reader = CachedReader(reader) if data.cache == "memory" else reader
    require_monitor(config, reader.channels)
    origin = choose_start(config, launch)
    base, weights = find_base(config, origin), find_initial_weights(config, origin)
    # adapters begin at step 0 of their own run
    start = origin if base is None or origin.resolve() != base else None
    if origin is None:
        assets = run_on_rank0(lambda: fit_assets(config, reader, splits["train"]))
        assets = assets if weights is None else assets_for_weights(config, assets, reader, weights)
    else:
        config, assets = load_run_state(config, reader, mesh, origin, goes_on=start is not None)
    assets = assets.after((splits["train"], splits["valid"]), reader.calendar)
    conf = config.trainer
    model, autocast = build_parallel_model(config, assets, mesh, device)
    if start is None or base is not None:
        _fill(model, base, weights, config.seed)
    model.train()
    stepper = build_stepper(config, assets, model, device, autocast)
    objective_context = ObjectiveContext(stepper, build_run_loss(config, assets, device), conf.recompute_steps)
    objective = build_objective(conf.objective, objective_context)
    optimizer = build_optimizer(model, conf)
    average = EMA(model, conf.ema_decay) if conf.use_ema else None
    frames = FrameReader(reader, data, assets.climatology)
    order = build_training_order(config, frames, reader, splits["train"], mesh)
    total, ramp = conf.max_steps or conf.num_epoch * order.steps_per_epoch, conf.forecast_len_from
    forecast_len = functools.partial(forecast_len_at, total=total, forecast_len=data.forecast_len, ramp=ramp)
    valid_loader, share = build_valid_loader(config, frames, reader, splits["valid"], mesh)
    weight_CHW = cell_weights(assets, device)

    def run_validation(step: int, stop: Callable[[], bool]) -> dict[str, float] | None:
        with DevicePrefetcher(valid_loader, device, mesh.tensor_peers) as batches:
            return validate(
                objective, batches, share, build_metrics(config, assets, weight_CHW), forecast_len(step - 1), stop
            )

    trainer = Trainer(
        TrainingComponents(
            config=config,
            launch=launch,
            mesh=mesh,
            assets=assets,
            calendar=reader.calendar,
            device=device,
            model=model,
            optimizer=optimizer,
            average=average,
            training_step=build_step(config, objective, optimizer, average, forecast_len, mesh.data_rank),
            order=order,
            total_steps=total,
            watchdog=watchdog,
            meter=build_meter(config, assets, device, mesh, order.samples_a_step, peaks or {}, began),
            validate=run_validation,
            preview=build_preview(config, frames, splits["valid"], stepper, weight_CHW, mesh, draw),
            base=describe_base(base) if base is not None else None,
        )
    )
    if start is not None:
        trainer.load(start)
    require_filled(model)
    if launch.is_main:
        write_config(config, Path(config.save_loc))
    return trainer


def _fill(model: nn.Module, base: Path | None, weights: Path | None, seed: int) -> None:
    """Fill a model: with `base` below new adapters, with the weights in a file, or as `seed` draws them."""
    if base is not None:
        load_base(model, base, seed)
    elif weights is not None:
        load_weights(model, weights)
    else:
        fill_(model, initial_values(model, seed))


def build_step(
    config: Config,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    average: EMA | None,
    forecast_len: Callable[[int], int],
    data_rank: int,
) -> TrainingStep:
    """Return what takes the run's optimizer steps."""
    conf = config.trainer
    settings = StepSettings(
        forecast_len=forecast_len,
        seed=config.seed,
        accumulation=conf.grad_accum_every,
        grad_max_norm=conf.grad_max_norm,
        counted_steps=conf.backprop_on_timestep,
        data_rank=data_rank,
    )
    return TrainingStep(objective, optimizer, average, settings)


def build_training_order(
    config: Config, frames: FrameReader, reader: FieldReader, split: Split, mesh: DeviceGrid
) -> SampleSchedule:
    """Return which samples this rank takes at each step."""
    data, conf = config.data, config.trainer
    initial = require_samples(reader.times, split, reader.calendar, data, data.forecast_len)
    placeholder = mesh.tensor_rank > 0
    dataset = ForecastDataset(
        frames, initial, data.step_minutes, data.history_len, data.forecast_len, placeholder=placeholder
    )
    return SampleSchedule(
        dataset,
        conf.train_batch_size,
        conf.grad_accum_every,
        config.seed,
        0 if placeholder else data.num_workers,
        data_rank=mesh.data_rank,
        data_ranks=mesh.data_ranks,
    )


def build_valid_loader(
    config: Config, frames: FrameReader, reader: FieldReader, split: Split, mesh: DeviceGrid
) -> tuple[Loader, ValidationShare]:
    """Return this rank's share of initial times spread over the whole of `split`, with forcing a forecast may know."""
    data = config.data
    found = require_samples(reader.times, split, reader.calendar, data, data.valid_forecast_len)
    initial = evenly_spaced(found, config.trainer.valid_samples)
    dataset = ForecastDataset(
        frames,
        initial,
        data.step_minutes,
        data.history_len,
        data.valid_forecast_len,
        as_forecast=True,
        placeholder=mesh.tensor_rank > 0,
    )
    share = shard_cases(len(initial), config.trainer.valid_batch_size, mesh.data_rank, mesh.data_ranks)
    return Loader(dataset, share.batches, workers=0), share


def validation_hours(config: Config) -> list[float]:
    """Return the lead times of the validation in hours."""
    return [(number + 1) * config.data.step_minutes / 60 for number in range(config.data.valid_forecast_len)]


def build_metrics(config: Config, assets: ModelAssets, weight_CHW: torch.Tensor) -> list[Metric]:
    """Return new metrics of a validation, without sums."""
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
