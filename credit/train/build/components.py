"""Components of a trainer, which `credit.train.build.training` builds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from credit.calendar import Calendar
from credit.config import Config
from credit.data.samples.loader import SampleSchedule
from credit.parallel.mesh import DeviceGrid
from credit.parallel.process_info import ProcessInfo
from credit.parallel.watchdog import Watchdog
from credit.train.build.assets import ModelAssets
from credit.train.build.validation import RunValidation
from credit.train.ema import EMA
from credit.train.monitor.preview import Preview
from credit.train.monitor.usage import UsageMeter
from credit.train.step import TrainingStep


@dataclass(frozen=True)
class TrainingComponents:
    """Components of a trainer.

    Attributes:
        config: the config of the run, with the ``trainer.train_batch_size`` and ``grad_accum_every`` that keep the
            global batch size on this number of ranks.
        process_info: rank and number of ranks of this process, and its job.
        assets: contents of a checkpoint other than weights, such as channels, grid and statistics.
        calendar: the calendar of the data.
        device: the device of this process.
        model: the model of this rank, sharded or not.
        optimizer: the optimizer of the trainable parameters.
        average: the moving average of the trainable parameters; None without ``trainer.use_ema``.
        training_step: function object that takes an optimizer step.
        sample_schedule: schedule of the samples of each optimizer step.
        total_steps: number of optimizer steps of the complete run.
        mesh: position of this rank in the device mesh.
        validate: collective function that validates the model's current weights.
        preview: object that makes previews during training; None without ``trainer.preview``.
        watchdog: the watchdog that detects when a rank hangs.
        meter: meter of the time, energy and operations of the run.
        base: description of the base checkpoint of adapters, see `credit.train.build.fine_tuning.describe_base`; None
            if all weights are trained.
    """

    config: Config
    process_info: ProcessInfo
    assets: ModelAssets
    calendar: Calendar
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: EMA | None
    training_step: TrainingStep
    sample_schedule: SampleSchedule
    total_steps: int
    mesh: DeviceGrid
    validate: RunValidation
    preview: Preview | None
    watchdog: Watchdog
    meter: UsageMeter
    base: dict[str, str] | None
