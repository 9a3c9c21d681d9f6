"""Timeline of a few steps: a Chrome trace of torch's profiler, with the phases of all threads."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from credit.train.profile.spans import Interval, Span
from credit.utils.atomic import atomic_write

# Name of the range around each step, followed by the number of the step.
STEP = "step "


class Timeline:
    """Recording of torch's profiler, whose clock is brought to that of `time.perf_counter`.

    Args:
        device: the device of this process.
    """

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Without it the library behind the profiler prints a line at its start and its end.
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")
        self._device = device
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def stop(self) -> None:
        """End the recording, after the GPU has finished its queued work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profiler.stop()

    def export(self) -> dict[str, Any]:
        """Return the Chrome trace."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            # Names of kernels may contain any bytes.
            return json.loads(path.read_text(encoding="utf-8", errors="replace"))


def find_steps(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """Return (start, end) of the ranges of the steps in a trace, in microseconds on its clock."""
    steps = []
    for event in events:
        # On a GPU there is a second range with the same name, for the kernels.
        if event.get("cat") == "user_annotation" and event["name"].startswith(STEP):
            steps.append((event["ts"], event["ts"] + event["dur"]))
    return sorted(steps)


def find_collectives(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """Return (start, end) of gloo's collectives in a trace, from the call to the end, in microseconds on its clock."""
    collectives = []
    for event in events:
        if event.get("ph") == "X" and event["name"].startswith("gloo:"):
            collectives.append((event["ts"], event["ts"] + event["dur"]))
    return collectives


def add_threads(
    trace: Mapping[str, Any], spans: Iterable[Span], main_thread: int, clock_offset: float
) -> dict[str, Any]:
    """Return a trace with the phases of the other threads, which torch's profiler does not record.

    Args:
        trace: the Chrome trace of this process.
        spans: phases of all threads.
        main_thread: id of the thread whose phases are in the trace already.
        clock_offset: microseconds to add to `time.perf_counter` in microseconds for the clock of the trace.
    """
    events = list(trace["traceEvents"])
    process = next(event["pid"] for event in events if event.get("cat") == "user_annotation")
    threads = set()
    for span in spans:
        if span.thread == main_thread:
            continue
        threads.add((span.thread, span.name))
        events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"{span.name} (thread)",
                "pid": process,
                "tid": span.thread,
                "ts": span.start * 1e6 + clock_offset,
                "dur": (span.end - span.start) * 1e6,
            }
        )
    for thread, name in threads:
        thread_name = {"name": f"thread of {name}"}
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": thread_name})
    return {**trace, "traceEvents": events}


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a compressed Chrome trace, which Perfetto opens.

    Raises:
        CreditError: if the file cannot be written.
    """

    def write(temporary: Path) -> None:
        with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=6) as file:
            json.dump(trace, file)

    atomic_write(path, write)
