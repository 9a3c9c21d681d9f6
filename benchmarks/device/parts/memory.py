"""Memory of training steps: the peaks that the part `steps` has measured, compared with the estimates of `credit plan`.

Planning takes seconds on the host while the device waits, so this part follows the parts that need the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.device.cases import Run
from benchmarks.device.context import Context
from benchmarks.device.parts import Row
from benchmarks.device.parts.steps import list_runs
from benchmarks.device.report import read_records
from benchmarks.device.work import plan_device_bytes


def run(context: Context) -> Iterator[Row]:
    """Yield the row of each run that the part `steps` has measured; without a GPU, the row has no peak."""
    yield from context.measure_cases(_list_cases(context))


def _list_cases(context: Context) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the name and the comparison of each run."""
    peaks: dict[str, float | None] = {}
    for record in read_records(context.folder, 0)[0]:
        if record["event"] == "row" and record["part"] == "steps" and "error" not in record["row"]:
            peaks[record["row"]["case"]] = record["row"]["peak GB"]
    for measured_run in list_runs(context):
        if measured_run.name in peaks:
            yield measured_run.name, partial(_compare_memory, measured_run, peaks[measured_run.name])


def _compare_memory(run: Run, peak_gb: float | None) -> Row:
    """Return the row that compares the measured peak of a run with its plan."""
    plan_gb = plan_device_bytes(run) / 1e9
    return {"peak GB": peak_gb, "plan GB": plan_gb, "peak / plan": None if peak_gb is None else peak_gb / plan_gb}
