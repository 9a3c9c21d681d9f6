"""A run small enough for this machine, planned and taken for real: what the plan says and what the allocator says."""

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

# few weights on many cells, so that activations are most of the memory
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
    """Return what plans `config` on a grid."""
    return TrainingStepBuilder(config, build_placeholder_assets(config, build_grid(grid), {}))


def traced(config: Config, rollout: int = 1, gpu: bool = False, grid: str = GRID) -> Trace:
    """Return the trace of a micro-step on one process."""
    step_builder = step_builder_of(config, grid)
    model, autocast = step_builder.build_network(DeviceGrid(), False, config.trainer.activation_checkpoint)
    start = functools.partial(step_builder.build_step, model, autocast, rollout, MemberBatches())
    return trace_step(model, start, gpu=gpu, autocast=autocast)


def real(config: Config, rollout: int = 1, grid: str = GRID) -> tuple[nn.Module, Any]:
    """Return the filled network and what takes a step with it."""
    step_builder = step_builder_of(config, grid)
    model, autocast = step_builder.build_network(DeviceGrid(), False, config.trainer.activation_checkpoint)
    allocate_(model, torch.device("cpu"))
    fill_(model, initial_values(model, seed=0))
    model.train()
    _, step = step_builder.build_step(model, autocast, rollout, MemberBatches(), 1)
    return model, lambda: step(lambda: None)


def allocated(config: Config, rollout: int = 1, grid: str = GRID) -> int:
    """Return the most bytes that torch's CPU allocator gave out at once in a step, gradients not counted."""
    model, step = real(config, rollout, grid)
    step()
    first, *others = model.parameters()  # one is left for clipping to have something
    for parameter in others:
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    return allocations(profiled)


def allocations(profiled: profile) -> int:
    """Return the most bytes that were allocated at once since profiling began.

    Memory that the kernel of a convolution takes for itself and returns is not counted: a trace cannot see it.
    """
    events = profiled.profiler.kineto_results.events()
    convolutions = []
    for event in events:
        if event.name() in ("aten::convolution", "aten::convolution_backward"):
            convolutions.append((event.start_ns(), event.end_ns()))
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        before, now = now, now + event.nbytes()
        if not any(start <= event.start_ns() <= end for start, end in convolutions):
            # `before` includes what the last convolution has left.
            most = max(most, before, now)
    return most


def counted_flops(config: Config) -> int:
    """Return the floating point operations of a step by torch's own counter."""
    _, step = real(config)
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()
