"""CPU time and peak memory of a section of code."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
# Linux sets the peak of the process's memory to its present memory if this number is written here.
_RESET_PEAK = (Path("/proc/self/clear_refs"), "5")


@dataclass
class Usage:
    """CPU time and memory that a section of code has used.

    Attributes:
        seconds: CPU time of the process.
        megabytes: largest increase of its resident memory, in MB (1e6 bytes).
    """

    seconds: float = 0.0
    megabytes: float = 0.0


@contextmanager
def measure_usage() -> Iterator[Usage]:
    """Context that yields the usage of the code inside it; the values are set at the end of the context."""
    usage = Usage()
    gc.collect()
    path, command = _RESET_PEAK
    path.write_text(command)
    kilobytes = _read_kilobytes("VmRSS")
    start = time.process_time()
    yield usage
    usage.seconds = time.process_time() - start
    usage.megabytes = (_read_kilobytes("VmHWM") - kilobytes) * 1024 / 1e6


def _read_kilobytes(name: str) -> int:
    """Return a memory value of this process, such as ``VmRSS``, in units of 1024 bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {name}")
