"""Training steps: time, MFU, memory, kernels, and the fraction of the time in which the device is idle.

MFU is the rate of operations divided by the rate of large matrix products in the same precision, which the part
`machine` measures. If the device is idle for most of a step, the host starts kernels more slowly than they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.device.accelerator import Accelerator
from benchmarks.device.cases import (
    AT_ONCE,
    ENSEMBLE,
    NETWORKS,
    NOISES,
    ONE_BY_ONE,
    PRECISIONS,
    Run,
    quarter_degree,
    quickstart,
)
from benchmarks.device.cases import starter as build_starter
from benchmarks.device.context import Context, time_steps
from benchmarks.device.parts import Row
from benchmarks.device.parts.machine import measure_peaks
from benchmarks.device.work import TrainingWork


def run(context: Context) -> Iterator[Row]:
    """Yield the row of each run; the most important runs come first."""
    yield from context.measure_cases(_list_cases(context))


def _list_cases(context: Context) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the name and the measurement of each run."""
    for run_case in context.select(list_runs(context)):
        yield run_case.name, partial(measure_step, context, run_case)


def list_runs(context: Context) -> list[Run]:
    """Return the runs to measure; the most important runs come first."""
    if context.run is not None:
        runs = [context.run.in_precision(precision) for precision in PRECISIONS]
        return [*runs, runs[-1].with_overrides("checkpointed", "trainer.activation_checkpoint=true")]
    fast = context.fast
    starter = build_starter(fast)
    small = quickstart("wxformer", fast)
    ensemble = small.in_precision("bfloat16").with_overrides("ensemble", *ENSEMBLE, *NOISES["global"])
    runs = [small.in_precision("bfloat16"), starter.in_precision("bfloat16"), starter.in_precision("tf32")]
    runs.append(starter.in_precision("bfloat16").with_overrides("checkpointed", "trainer.activation_checkpoint=true"))
    if not fast:
        large = quarter_degree().in_precision("bfloat16")
        runs.append(large.with_overrides("checkpointed", "trainer.activation_checkpoint=true"))
        runs.append(large.with_overrides("all kept", "trainer.activation_checkpoint=false"))
    runs += [quickstart(name, fast).in_precision("bfloat16") for name in NETWORKS if name != "wxformer"]
    runs += [small.in_precision("tf32"), small.in_precision("float32"), starter.in_precision("float32")]
    runs += [ensemble.with_overrides("one by one", ONE_BY_ONE), ensemble.with_overrides("at once", AT_ONCE)]
    runs.append(starter.in_precision("bfloat16").with_overrides("selective", "trainer.activation_checkpoint=selective"))
    return runs


def measure_step(context: Context, run: Run) -> Row:
    """Return the row of the training step of a run."""
    accelerator = context.accelerator
    work = TrainingWork(run, accelerator.device)
    accelerator.reset_peak()
    row = measure_speed(accelerator, work.step, work.samples, 0.0 if context.fast else 1.5)
    seconds = float(row["ms"]) / 1e3
    tflop = work.count_operations()
    if tflop:
        peaks = measure_peaks(accelerator, context.fast)
        row["TFLOP/s"] = sum(tflop.values()) / seconds
        row["MFU"] = sum(count / peaks[rate] for rate, count in tflop.items()) / seconds
    return row


def measure_speed(accelerator: Accelerator, step: Callable[[], object], samples: int, seconds: float) -> Row:
    """Return time, memory and kernels of a step.

    Args:
        accelerator: the device; the reported peak of memory is the peak since its last reset.
        step: function that takes a step of `samples` samples.
        samples: number of samples.
        seconds: time of the measurement in seconds; 0 to measure as few steps as possible.
    """
    timing = time_steps(accelerator, step, seconds, rounds=5 if seconds else 2, warm_up=3 if seconds else 1)
    peak_bytes = accelerator.peak_bytes()
    row: Row = {
        "ms": timing.median * 1e3,
        "least": timing.least * 1e3,
        "most": timing.most * 1e3,
        "samples/s": samples / timing.median,
        "host ms": timing.queued * 1e3,
        "peak GB": None if peak_bytes is None else peak_bytes / 1e9,
    }
    profile = accelerator.profile(step)
    row |= {
        "kernels": profile.kernels,
        "launches": profile.launches,
        "device ms": profile.busy_s * 1e3,
        # Not below 0, as the profiled step is another one than those that were timed.
        "device idle": max(0.0, 1 - profile.busy_s / timing.median),
        "longest": profile.describe_longest(),
    }
    return row
