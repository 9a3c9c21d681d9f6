"""The parts that a trainer works with."""

from __future__ import annotations

from collections.abc import Callable
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
from credit.train.ema import EMA
from credit.train.monitor.preview import Preview
from credit.train.monitor.usage import UsageMeter
from credit.train.step import TrainingStep


@dataclass(frozen=True)
class TrainingComponents:
    """Components of a trainer; built by `credit.train.build.training`."""

    config: Config
    launch: ProcessInfo
    assets: ModelAssets
    calendar: Calendar
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: EMA | None
    training_step: TrainingStep
    order: SampleSchedule
    total_steps: int
    mesh: DeviceGrid
    # optimizer step, function that says whether to stop -> metrics of the model's weights; None if it was stopped
    validate: Callable[[int, Callable[[], bool]], dict[str, float] | None]
    preview: Preview | None
    watchdog: Watchdog
    meter: UsageMeter
    # description of the checkpoint that adapters adapt; None where all weights train
    base: dict[str, str] | None
