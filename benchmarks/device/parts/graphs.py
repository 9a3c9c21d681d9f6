"""A whole training step as one CUDA graph: the time of a step that the host starts with a single call.

`trainer.compile: reduce-overhead` replays the blocks as graphs, and starts the kernels between the blocks one by one.
This part shows the additional gain of a graph of the whole step. The graph cannot be used for training, because the
learning rate and the step number are fixed in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch

from benchmarks.device.cases import NETWORKS, Run, quickstart, starter
from benchmarks.device.context import Context, time_steps
from benchmarks.device.parts import Row
from benchmarks.device.work import TrainingWork


def run(context: Context) -> Iterator[Row]:
    """Yield the row of each small network and of the 1 degree starter."""
    yield from context.measure_cases(_list_cases(context))


def _list_cases(context: Context) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the name and the measurement of each run."""
    runs = [quickstart("wxformer", context.fast), starter(context.fast)]
    runs += [quickstart(name, context.fast) for name in NETWORKS if name != "wxformer"]
    if context.run is not None:
        runs = [context.run]
    for case_run in context.select(runs):
        yield case_run.name, partial(measure_graph, context, case_run.in_precision("bfloat16"))


def measure_graph(context: Context, run: Run) -> Row:
    """Return the row of a run: time of a step, time of its replay, and True if the replay reduces the loss."""
    accelerator = context.accelerator
    if not accelerator.is_gpu:
        return {"note": "a CPU has no CUDA graphs"}
    seconds = 0.0 if context.fast else 1.0
    work = TrainingWork(run, accelerator.device)
    # The step seeds torch's generators for dropout, which a graph cannot contain, and which these networks lack.
    with mock.patch.object(torch, "manual_seed"):
        timing = time_steps(accelerator, work.step, seconds)
        losses = []
        replay = accelerator.capture(lambda: losses.append(work.step()))
    accelerator.reset_peak()
    # The graph writes the loss of each replay to the memory of this tensor.
    loss = losses[-1]
    replay()
    first_loss = loss.item()
    replay_timing = time_steps(accelerator, replay, seconds)
    last_loss = loss.item()
    profile = accelerator.profile(replay)
    return {
        "ms": timing.median * 1e3,
        "graph ms": replay_timing.median * 1e3,
        "speed-up": timing.median / replay_timing.median,
        "kernels": profile.kernels,
        "device ms": profile.busy_s * 1e3,
        "first loss": first_loss,
        "last loss": last_loss,
        # The batch is always the same, so further steps must fit it better.
        "ok": last_loss < first_loss,
    }
