"""Builders of the validation of a run: initial times, metrics, and the function that a trainer calls."""

from __future__ import annotations

from collections.abc import Callable

import torch

from credit.channels import ChannelMap
from credit.config import Config
from credit.data.samples.dataset import SampleDataset
from credit.data.samples.frames import FrameReader
from credit.data.samples.loader import Loader
from credit.data.splits import Split, require_samples
from credit.errors import ConfigError, did_you_mean
from credit.forecast.objectives.base import Objective
from credit.metrics import Metric, MetricContext, find_metric_class
from credit.parallel.mesh import DeviceGrid
from credit.train.build.assets import ModelAssets
from credit.train.prefetch import DevicePrefetcher
from credit.train.validate import ValidationShare, select_evenly_spaced, shard_cases, validate

# Collective function that returns the metrics of the model's current weights; None if the validation was stopped. Its
# arguments are the number of optimizer steps taken, and a function that returns True if this rank must stop.
RunValidation = Callable[[int, Callable[[], bool]], dict[str, float] | None]


def build_validation(
    config: Config,
    assets: ModelAssets,
    objective: Objective,
    frames: FrameReader,
    split: Split,
    forecast_len: Callable[[int], int],
    weight_CHW: torch.Tensor,
    mesh: DeviceGrid,
) -> RunValidation:
    """Return the collective function that validates the model's current weights.

    Args:
        config: the config of the run.
        assets: the assets of the model.
        objective: the training objective, which makes the forecasts and computes the loss.
        frames: reader of initial states, forcing and targets.
        split: the validation period.
        forecast_len: function that maps an optimizer step (from 0) to the number of rollout steps in training.
        weight_CHW: weights of the cells of the output channels, from `compute_cell_weights`.
        mesh: position of this rank in the device mesh.

    Raises:
        DataError: if no sample fits into the validation period.
    """
    loader, share = build_valid_loader(config, frames, split, mesh)
    device = weight_CHW.device

    def run_validation(step: int, stop: Callable[[], bool]) -> dict[str, float] | None:
        metrics = build_metrics(config, assets, weight_CHW)
        # The loss is averaged over the same number of rollout steps as in the last training step.
        num_loss_steps = forecast_len(step - 1)
        with DevicePrefetcher(loader, device, mesh.field_group) as batches:
            return validate(objective, batches, share, metrics, num_loss_steps, stop)

    return run_validation


def build_valid_loader(
    config: Config, frames: FrameReader, split: Split, mesh: DeviceGrid
) -> tuple[Loader, ValidationShare]:
    """Return the loader of this rank's validation batches, and the cases (initial times) in these batches.

    The validation uses at most ``trainer.valid_samples`` initial times, evenly spaced over the complete period. The
    samples contain the same forcing as forecasts, without values that are not known in advance.

    Args:
        config: the config of the run.
        frames: reader of initial states, forcing and targets.
        split: the validation period.
        mesh: position of this rank in the device mesh.

    Raises:
        DataError: if no sample fits into the period.
    """
    data = config.data
    reader = frames.reader
    possible_times = require_samples(reader.times, split, reader.calendar, data, data.valid_forecast_len)
    initial_times = select_evenly_spaced(possible_times, config.trainer.valid_samples)
    dataset = SampleDataset(
        frames,
        initial_times,
        data.step_minutes,
        data.history_len,
        data.valid_forecast_len,
        as_forecast=True,
        # Of the ranks with the same part of the fields, the first reads and broadcasts, and the others have
        # placeholders. Unlike in training, the ranks of an ensemble group have different cases, and each rank computes
        # all members of its cases.
        placeholder=mesh.field_rank > 0,
    )
    share = shard_cases(len(initial_times), config.trainer.valid_batch_size, mesh.data_rank, mesh.num_data_ranks)
    return Loader(dataset, share.batches, workers=0), share


def validation_lead_hours(config: Config) -> list[float]:
    """Return the lead times of the validation in hours, one for each of ``data.valid_forecast_len`` steps."""
    return [(index + 1) * config.data.step_minutes / 60 for index in range(config.data.valid_forecast_len)]


def build_metrics(config: Config, assets: ModelAssets, weight_CHW: torch.Tensor) -> list[Metric]:
    """Build a new metric for each name in ``trainer.metrics``; all sums of the metrics are zero.

    Args:
        config: the config of the run.
        assets: the assets of the model.
        weight_CHW: weights of the cells of the output channels, from `compute_cell_weights`.
    """
    context = MetricContext(assets.channels, weight_CHW, validation_lead_hours(config))
    return [find_metric_class(name)(context) for name in config.trainer.metrics]


def require_measured_monitor(config: Config, channels: ChannelMap) -> None:
    """Raise ConfigError unless the validation measures ``trainer.monitor``, which selects the best checkpoint.

    Args:
        config: the config of the run.
        channels: the channels of the model.

    Raises:
        ConfigError: if the metric is not measured, or a name in ``trainer.metrics`` is unknown.
    """
    measured_names = ["loss"]
    for name in config.trainer.metrics:
        measured_names += find_metric_class(name).names(channels, validation_lead_hours(config))
    monitor = config.trainer.monitor
    if monitor not in measured_names:
        raise ConfigError(f'trainer.monitor: "{monitor}" is not measured{did_you_mean(monitor, measured_names)}')
