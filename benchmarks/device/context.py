"""Device, time limit and options of a part, and functions that measure its cases one after another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.device.accelerator import Accelerator
from benchmarks.device.cases import Run
from benchmarks.device.parts import Row

Item = TypeVar("Item")
# Longest text of an error in a table.
_ERROR_LENGTH = 300


@dataclass(frozen=True)
class Context:
    """Device, time and options of a part.

    Attributes:
        accelerator: the device.
        fast: True for small networks and few repetitions, to try the script.
        deadline: value of `time.monotonic` after which no further case begins.
        folder: folder of the records.
        reference: folder with the unpacked wheel of the published package; None for no comparison.
        words: only cases whose names contain one of these words are measured; empty for all cases.
        run: run that parts measure instead of their lists of runs; None to measure these lists.
    """

    accelerator: Accelerator
    fast: bool
    deadline: float
    folder: Path
    reference: Path | None = None
    words: Sequence[str] = ()
    run: Run | None = None

    def select(self, items: Iterable[Item], count: int = 1) -> list[Item]:
        """Return all items, or only the first `count` items if `fast` is true."""
        selected = list(items)
        return selected[:count] if self.fast else selected

    def measure_cases(self, cases: Iterable[tuple[str, Callable[[], Row]]]) -> Iterator[Row]:
        """Measure cases one after another, and yield the row of each; after an error, the row contains the error.

        Args:
            cases: name and function that returns the row.

        Raises:
            Exception: the error of a case after which this process cannot use the GPU.
        """
        for name, measure in cases:
            if self.words and not any(word in name for word in self.words):
                continue
            if time.monotonic() > self.deadline:
                yield {"case": name, "error": "not reached, as the part's time was over"}
                continue
            try:
                row = measure()
            except Exception as error:
                if not self.accelerator.is_usable():
                    raise
                row = {"error": describe_error(error)}
            self.accelerator.release()
            yield {"case": name, **row}


def describe_error(error: Exception) -> str:
    """Return the type of an error and the beginning of its message in one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:_ERROR_LENGTH]


@dataclass(frozen=True)
class Timing:
    """Times of a step in seconds.

    Attributes:
        median: median over the rounds.
        least: shortest of the rounds.
        most: longest of the rounds.
        queued: median of the time until the host has queued a step, without waiting for the device.
    """

    median: float
    least: float
    most: float
    queued: float


def time_steps(
    accelerator: Accelerator, step: Callable[[], object], seconds: float = 1.5, rounds: int = 5, warm_up: int = 3
) -> Timing:
    """Return the time of a step, from an idle device until the device is idle again.

    Args:
        accelerator: the device.
        step: function that takes a step.
        seconds: time of all rounds together; a round has at least one step.
        rounds: number of rounds.
        warm_up: number of steps before the measurement.
    """
    for _ in range(warm_up):
        step()
    accelerator.synchronize()
    start = time.perf_counter()
    step()
    accelerator.synchronize()
    step_seconds = time.perf_counter() - start
    steps_per_round = max(1, min(200, round(seconds / rounds / step_seconds)))
    times = []
    queue_times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps_per_round):
            step()
        queue_times.append((time.perf_counter() - start) / steps_per_round)
        accelerator.synchronize()
        times.append((time.perf_counter() - start) / steps_per_round)
    return Timing(statistics.median(times), min(times), max(times), statistics.median(queue_times))
