"""Kernels of `credit/models/kernels/`: the dispatch's choice on the device, its correctness and its speed.

Each kernel is measured in a whole step, alternately with the choice of the dispatch and with the other formulation. If
the dispatch chooses the kernel, the other formulation is plain torch; otherwise it is the kernel. The ratio is the cost
of the other formulation divided by the cost of the choice, so a ratio below 1 means that the choice is wrong. The ratio
of device times decides, because most of these steps wait for the host.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from benchmarks.device.cases import starter
from benchmarks.device.context import Context
from benchmarks.device.parts import Row
from benchmarks.device.work import ForecastWork, TrainingWork, compare_gradients, relative_difference
from credit.models.kernels.dispatch import KERNELS, Kernel, use_plain_formulations, uses_kernel

# Modules that ask the dispatch.
_CALLERS = (
    "credit.models.kernels.attention",
    "credit.models.kernels.merged_head",
    "credit.models.kernels.mlp",
    "credit.models.kernels.recompute_linear",
    "credit.models.layers.cross_scale_embedding",
)
# Row of a kernel for CPUs, or for float32, in bfloat16 on another device, where it does not run at all.
_CPU_ONLY_ROW: Row = {"chosen": "plain", "note": "the kernel does not run here"}
# Ratios from here on count as no loss; the clock of a GPU varies by a percent or two.
_LEAST_RATIO = 0.98


def run(context: Context) -> Iterator[Row]:
    """Yield a row for each kernel in training and forecast steps of the 1 degree starter, by precision."""
    yield from context.measure_cases(_list_cases(context))


def _list_cases(context: Context) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the name and the measurement of each kernel in each kind of step."""
    device = context.accelerator.device
    measured_run = context.run or starter(context.fast)
    # A choice says most where the dispatch makes it, so the kernels that it chooses on a GPU come first.
    kernels = sorted(KERNELS, key=lambda kernel: kernel.cpu_only)
    for precision in context.select(("bfloat16", "tf32", "float32")):
        case_run = measured_run.in_precision(precision)
        is_half = precision == "bfloat16"
        # The kernels share one network, which is built for the first of them.
        build_training = functools.cache(partial(TrainingWork, case_run, device))
        build_forecast = functools.cache(partial(ForecastWork.build, case_run, device))
        for kernel in context.select(kernels, 3):
            yield (
                f"training {precision}, {kernel.name}",
                partial(_compare_training, context, build_training, kernel, is_half),
            )
        for kernel in context.select(kernels):
            yield (
                f"forecast {precision}, {kernel.name}",
                partial(_compare_forecast, context, build_forecast, kernel, is_half),
            )


def _compare_training(context: Context, build: Callable[[], TrainingWork], kernel: Kernel, is_half: bool) -> Row:
    """Return the row of a kernel in a training step; `is_half` is True in bfloat16."""
    is_chosen = _is_chosen(kernel, context.accelerator.device, is_half)
    if is_half and not is_chosen:
        return _CPU_ONLY_ROW
    work = build()
    other = partial(_replace_choice, kernel, is_chosen)
    loss, gradients = work.gradients()
    with other():
        other_loss, other_gradients = work.gradients()
    row = _start_row(is_chosen)
    row["loss"] = relative_difference(other_loss, loss)
    row["gradient"] = compare_gradients(other_gradients, gradients)[0]
    return row | _compare_cost(context, work.step, other)


def _compare_forecast(context: Context, build: Callable[[], ForecastWork], kernel: Kernel, is_half: bool) -> Row:
    """Return the row of a kernel in a forecast step; `is_half` is True in bfloat16."""
    is_chosen = _is_chosen(kernel, context.accelerator.device, is_half)
    if is_half and not is_chosen:
        return _CPU_ONLY_ROW
    work = build()
    other = partial(_replace_choice, kernel, is_chosen)
    output_BCHW = work.step()
    with other():
        other_BCHW = work.step()
    row = _start_row(is_chosen)
    row["output"] = relative_difference(other_BCHW, output_BCHW)
    return row | _compare_cost(context, work.step, other)


def _start_row(is_chosen: bool) -> Row:
    """Return a new row with the cell that contains the choice of the dispatch."""
    return {"chosen": "kernel" if is_chosen else "plain"}


def _is_chosen(kernel: Kernel, device: torch.device, amp: bool) -> bool:
    """Return True if the dispatch chooses the kernel on this device and in this precision."""
    with torch.autocast(device.type, torch.bfloat16, enabled=amp):
        return uses_kernel(kernel, torch.zeros(1, device=device))


@contextmanager
def _replace_choice(kernel: Kernel, is_chosen: bool) -> Iterator[None]:
    """Context in which a kernel computes with the formulation that the dispatch does not choose."""
    if is_chosen:
        with use_plain_formulations(kernel):
            yield
        return

    def choose(asked: Kernel, x: Tensor) -> bool:
        return asked is kernel or uses_kernel(asked, x)

    with ExitStack() as stack:
        for name in _CALLERS:
            stack.enter_context(mock.patch.object(importlib.import_module(name), "uses_kernel", choose))
        yield


def _compare_cost(
    context: Context, step: Callable[[], Tensor], other: Callable[[], AbstractContextManager[None]]
) -> Row:
    """Return total time, device time and memory of a step, and the ratios to a step with the other formulation."""
    accelerator = context.accelerator

    def take_other_step() -> Tensor:
        with other():
            return step()

    steps = {"chosen": step, "other": take_other_step}
    times: dict[str, list[float]] = {name: [] for name in steps}
    num_rounds = 1 if context.fast else 6
    for round_number in range(num_rounds + 1):
        # The order alternates, in case the second step of a round is faster.
        names = list(steps) if round_number % 2 else list(reversed(steps))
        for name in names:
            accelerator.synchronize()
            start = time.perf_counter()
            steps[name]()
            accelerator.synchronize()
            times[name].append(time.perf_counter() - start)
    # The first round warms up.
    seconds = {name: statistics.median(values[1:]) for name, values in times.items()}
    peaks = {}
    busy_seconds = {}
    for name, take_step in steps.items():
        accelerator.reset_peak()
        busy_seconds[name] = accelerator.profile(take_step).busy_s
        peaks[name] = accelerator.peak_bytes()
    device_ratio = busy_seconds["other"] / busy_seconds["chosen"]
    return {
        "ms": seconds["chosen"] * 1e3,
        "ratio": seconds["other"] / seconds["chosen"],
        "device ms": busy_seconds["chosen"] * 1e3,
        "device ratio": device_ratio,
        "memory ratio": None if peaks["other"] is None else peaks["other"] / peaks["chosen"],
        # On a CPU the script is only tried.
        "ok": device_ratio >= _LEAST_RATIO if accelerator.is_gpu else None,
    }
