"""Compiled blocks and CUDA graphs of small networks: time of the first step, and time of later steps.

The losses of some steps are compared with the losses of the same steps without a compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.device.cases import NETWORKS, Run, quickstart, starter
from benchmarks.device.context import Context
from benchmarks.device.parts import Row
from benchmarks.device.parts.steps import measure_speed
from benchmarks.device.work import TrainingWork, relative_difference

# Value of ``trainer.compile``; each case is compared with the first.
_MODES = ("false", "reduce-overhead", "true")
_NUM_LOSSES = 3
# Largest relative difference of the losses, in bfloat16.
_TOLERANCE = 1e-2


def run(context: Context) -> Iterator[Row]:
    """Yield the row of each network and mode, small networks first."""
    yield from context.measure_cases(_list_cases(context))


def _list_cases(context: Context) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the name and the measurement of each network and mode."""
    names = ["wxformer", "sfno", *(name for name in NETWORKS if name not in ("wxformer", "sfno"))]
    runs = [quickstart(name, context.fast) for name in context.select(names)]
    if not context.fast:
        runs.append(starter(fast=False))
    if context.run is not None:
        runs = [context.run]
    # Name of a run -> its losses without a compiler.
    expected: dict[str, torch.Tensor] = {}
    for case_run in runs:
        precise_run = case_run.in_precision("bfloat16")
        for mode in context.select(_MODES, 2):
            yield f"{case_run.name}, compile {mode}", partial(_measure_mode, context, precise_run, mode, expected)


def _measure_mode(context: Context, run: Run, mode: str, expected: dict[str, torch.Tensor]) -> Row:
    """Return the row of a network with one value of ``trainer.compile``.

    Args:
        context: device, time and options.
        run: the run.
        mode: value of ``trainer.compile``.
        expected: name of a run -> its losses without a compiler; extended by the mode "false".
    """
    accelerator = context.accelerator
    skipped_before = _count_skipped_graphs()
    work = TrainingWork(run.with_overrides("", f"trainer.compile={mode}"), accelerator.device)
    accelerator.reset_peak()
    start = time.perf_counter()
    losses = [work.step().cpu()]
    start_seconds = time.perf_counter() - start
    losses += [work.step().cpu() for _ in range(_NUM_LOSSES - 1)]
    # In the second and third step, torch warms up and records the graphs.
    row: Row = {"first step s": start_seconds, f"{_NUM_LOSSES} steps s": time.perf_counter() - start}
    row |= measure_speed(accelerator, work.step, work.samples, 0.0 if context.fast else 1.0)
    row["graphs skipped"] = _count_skipped_graphs() - skipped_before
    stacked_losses = torch.stack(losses).double()
    if mode == "false":
        expected[run.name] = stacked_losses
    elif run.name in expected:
        difference = relative_difference(stacked_losses, expected[run.name])
        row |= {"losses": difference, "ok": difference <= _TOLERANCE}
    return row


def _count_skipped_graphs() -> int:
    """Return the number of compiled functions in this process for which torch did not use CUDA graphs."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["cudagraph_skips"]
