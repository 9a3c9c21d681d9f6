"""Training step of the published package's network and of our network, on the grid of the 1 degree starter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.device.cases import starter
from benchmarks.device.context import Context
from benchmarks.device.parts import Row
from benchmarks.device.parts.steps import measure_step

_BENCHMARKS = Path(__file__).parents[2]


def run(context: Context) -> Iterator[Row]:
    """Yield the rows of both networks in float32 (with torch's defaults) and bfloat16."""
    if context.reference is None:
        raise ValueError("the part `reference` needs --reference FOLDER")
    yield from context.measure_cases(_list_cases(context))


def _list_cases(context: Context) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the name and the measurement of each network and precision."""
    for precision in ("bfloat16", "tf32"):
        ours = starter(context.fast).in_precision(precision)
        yield f"this package, {precision}", partial(measure_step, context, ours)
        yield f"published package, {precision}", partial(_measure_published, context, precision)


def _measure_published(context: Context, precision: str) -> Row:
    """Return the row of the published network, measured in a process that imports the published package as `credit`."""
    script = _BENCHMARKS / "device" / "published_step.py"
    arguments = [context.accelerator.device.type, precision]
    environment = {**os.environ, "PYTHONPATH": f"{context.reference}:{_BENCHMARKS}"}
    command = [sys.executable, str(script), *arguments]
    process = subprocess.run(command, env=environment, cwd=context.reference, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(process.stderr.strip()[-300:])
    # The last line is the result; libraries may print before it.
    return json.loads(process.stdout.splitlines()[-1])
