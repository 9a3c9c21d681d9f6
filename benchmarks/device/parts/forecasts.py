"""Forecast steps with output in physical units: time, memory and kernels by precision, and time of a whole rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.device.cases import NETWORKS, PRECISIONS, Run, quarter_degree, quickstart, starter
from benchmarks.device.context import Context, time_steps
from benchmarks.device.parts import Row
from benchmarks.device.parts.steps import measure_speed
from benchmarks.device.work import ForecastWork

_ROLLOUT_STEPS = 40


def run(context: Context) -> Iterator[Row]:
    """Yield the row of each run and precision."""
    yield from context.measure_cases(_list_cases(context))


def _list_cases(context: Context) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the name and the measurement of each run."""
    runs = [starter(context.fast).in_precision(precision) for precision in PRECISIONS]
    runs += [quickstart(name, context.fast).in_precision("bfloat16") for name in NETWORKS]
    if not context.fast:
        runs.append(quarter_degree().in_precision("bfloat16"))
    if context.run is not None:
        runs = [context.run.in_precision(precision) for precision in PRECISIONS]
    for case_run in context.select(runs):
        yield case_run.name, partial(_measure_forecast, context, case_run)


def _measure_forecast(context: Context, run: Run) -> Row:
    """Return the row of a forecast step, with the time of a step in a rollout."""
    accelerator = context.accelerator
    work = ForecastWork.build(run, accelerator.device)
    accelerator.reset_peak()
    row: Row = {"states": work.states}
    row |= measure_speed(accelerator, work.step, work.states, 0.0 if context.fast else 1.0)
    num_steps = 2 if context.fast else _ROLLOUT_STEPS
    timing = time_steps(accelerator, partial(work.rollout, num_steps), 0.0, rounds=2, warm_up=0)
    row["ms a rollout step"] = timing.median / num_steps * 1e3
    return row
