"""Training step that is small enough to be traced and also executed, with measurements to compare with a plan."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
import yaml
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from credit.cli.init import load_starter_configs
from credit.cli.plan import TrainingStepBuilder, build_grid
from credit.config import Config, build_config
from credit.config.load import _StrictLoader, apply_overrides
from credit.hpc.planner.planned_run import MemberBatches
from credit.hpc.planner.trace import Trace, trace_step
from credit.models.initialise import initial_values
from credit.parallel.mesh import DeviceGrid
from credit.parallel.state.materialise import allocate_, fill_
from credit.train.build.dry_run import build_placeholder_assets

# With few weights and many cells, activations are most of the memory.
SMALL = [
    "model={type: wxformer, dim: [16, 32, 64, 128], depth: [1, 1, 1, 1], dim_head: 8, decoder: pixel_shuffle, "
    "global_window_size: [4, 4, 2, 1], local_window_size: [4, 4, 2, 1], padding: {mode: earth, lat: auto, lon: auto}}",
    "trainer={max_steps: 10, use_ema: true}",
]
GRID = "48x96"


def small_config(*overrides: str) -> Config:
    """Return the quickstart with a small network."""
    raw = yaml.load(load_starter_configs()["quickstart"], Loader=_StrictLoader)
    return build_config(apply_overrides(raw, [*SMALL, *overrides]))


def step_builder_of(config: Config, grid: str = GRID) -> TrainingStepBuilder:
    """Return a builder of training steps for `config` on a grid."""
    return TrainingStepBuilder(config, build_placeholder_assets(config, build_grid(grid), {}))


def traced(config: Config, rollout: int = 1, gpu: bool = False, grid: str = GRID) -> Trace:
    """Return the trace of a micro-step on one process."""
    step_builder = step_builder_of(config, grid)
    model, autocast = step_builder.build_network(DeviceGrid(), False, config.trainer.activation_checkpoint)
    start = functools.partial(step_builder.build_step, model, autocast, rollout, MemberBatches())
    return trace_step(model, start, gpu=gpu, autocast=autocast)


def build_real_step(config: Config, rollout: int = 1, grid: str = GRID) -> tuple[nn.Module, Any]:
    """Return a network with initial values, and a function that takes one training step with it."""
    step_builder = step_builder_of(config, grid)
    model, autocast = step_builder.build_network(DeviceGrid(), False, config.trainer.activation_checkpoint)
    allocate_(model, torch.device("cpu"))
    fill_(model, initial_values(model, seed=0))
    model.train()
    _, step = step_builder.build_step(model, autocast, rollout, MemberBatches(), 1)
    return model, lambda: step(lambda: None)


def measure_peak_bytes(config: Config, rollout: int = 1, grid: str = GRID) -> int:
    """Return the peak of bytes that torch's CPU allocator allocates in a step, without gradients."""
    model, step = build_real_step(config, rollout, grid)
    step()
    first, *others = model.parameters()  # Clipping needs at least one gradient.
    for parameter in others:
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    return allocations(profiled)


def allocations(profiled: profile) -> int:
    """Return the peak of allocated bytes since profiling began.

    Temporary memory inside convolution kernels is not counted, because a trace does not contain it.
    """
    events = profiled.profiler.kineto_results.events()
    convolutions = []
    for event in events:
        if event.name() in ("aten::convolution", "aten::convolution_backward"):
            convolutions.append((event.start_ns(), event.end_ns()))
    current_bytes = peak_bytes = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        previous_bytes, current_bytes = current_bytes, current_bytes + event.nbytes()
        if not any(start <= event.start_ns() <= end for start, end in convolutions):
            # `previous_bytes` includes the memory that the previous convolution still holds.
            peak_bytes = max(peak_bytes, previous_bytes, current_bytes)
    return peak_bytes


def counted_flops(config: Config) -> int:
    """Return the floating point operations of a step by torch's counter."""
    _, step = build_real_step(config)
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()
