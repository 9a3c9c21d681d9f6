"""Checkpoints: the time for which training waits, and the slowdown of steps while the file is written."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from benchmarks.device.cases import Run, quickstart, starter
from benchmarks.device.context import Context
from benchmarks.device.parts import Row
from benchmarks.device.work import TrainingWork
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from credit.train.checkpoint.retention import Retention
from credit.train.optim import optimizer_tensors

_NUM_SAVES = 4


def run(context: Context) -> Iterator[Row]:
    """Yield the row of asynchronous and of synchronous saves of each run."""
    yield from context.measure_cases(_list_cases(context))


def _list_cases(context: Context) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the name and the measurement of each case."""
    runs = [quickstart("wxformer", context.fast)]
    if not context.fast:
        runs.insert(0, starter(context.fast))
    for case_run in runs:
        for synchronous in context.select((False, True)):
            kind = "synchronous" if synchronous else "asynchronous"
            precise_run = case_run.in_precision("bfloat16")
            yield f"{case_run.name}, {kind}", partial(_measure_saves, context, precise_run, synchronous)


def _measure_saves(context: Context, run: Run, synchronous: bool) -> Row:
    """Return the row of a run: the stall of a save, and the time of steps while a checkpoint is written."""
    accelerator = context.accelerator
    work = TrainingWork(run, accelerator.device)
    undisturbed = _time_single_steps(context, work, 10)
    tensors = _list_tensors(work)
    stalls = []
    completions = []
    disturbed: list[float] = []
    with tempfile.TemporaryDirectory() as folder, AsyncCheckpointer(Path(folder)) as checkpointer:
        for number in range(2 if context.fast else _NUM_SAVES):
            accelerator.synchronize()
            start = time.perf_counter()
            checkpointer.save(number, tensors, {}, {}, keep=Retention(last=1), synchronous=synchronous)
            stalls.append(time.perf_counter() - start)
            # Steps go on while a thread writes the file.
            disturbed += _time_single_steps(context, work, 3)
            checkpointer.wait()
            completions.append(time.perf_counter() - start)
    num_bytes = sum(tensor.nbytes for stem in tensors.values() for tensor in stem.values())
    return {
        "GB": num_bytes / 1e9,
        # The first save allocates the host memory that the later ones use again.
        "first stall ms": stalls[0] * 1e3,
        "stall ms": statistics.median(stalls[1:]) * 1e3,
        "complete s": statistics.median(completions[1:]),
        "step ms": statistics.median(undisturbed) * 1e3,
        "step beside it ms": statistics.median(disturbed) * 1e3,
    }


def _time_single_steps(context: Context, work: TrainingWork, count: int) -> list[float]:
    """Return the seconds of `count` steps; each time ends when the device has finished the step."""
    seconds = []
    for _ in range(2 if context.fast else count):
        start = time.perf_counter()
        work.step()
        context.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def _list_tensors(work: TrainingWork) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a checkpoint: weights, averaged weights and the optimizer's state."""
    weights = {name: parameter.detach() for name, parameter in work.model.named_parameters()}
    return {"model": weights, "forecast": dict(weights), "optimizer": optimizer_tensors(work.model, work.optimizer)}
