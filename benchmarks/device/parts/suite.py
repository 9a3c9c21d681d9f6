"""Tests in `tests/gpu`, which compare a GPU with the CPU and check that steps do not wait for the GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.device.context import Context
from benchmarks.device.parts import Row

_REPOSITORY = Path(__file__).parents[3]


def run(context: Context) -> Iterator[Row]:
    """Yield a row for each failed test, and a row with the number of tests."""
    timeout = max(5.0, context.deadline - time.monotonic())
    # Compilation takes too long here; the part `compiled` compares its losses.
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu/test_equality.py"]
    try:
        process = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode() if isinstance(output, bytes) else output
        yield {"case": "all", "error": f"not finished after {timeout:.0f} s: {text[-200:]}"}
        return
    for line in process.stdout.splitlines():
        if re.match(r"(FAILED|ERROR) ", line):
            yield {"case": line[:200], "ok": False}
    # Pytest ends with 5 if there is nothing to run.
    summary = (process.stdout.strip() or process.stderr.strip()).splitlines()[-1:]
    yield {"case": "all", "summary": " ".join(summary), "ok": process.returncode == 0}
