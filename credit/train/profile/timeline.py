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

# Prefix of the name of a step in the timeline, followed by the number of the step.
STEP = "step "


class Timeline:
    """Recording of torch's profiler. The recording starts when the object is built.

    Args:
        device: the device of this process.
    """

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Without this variable, Kineto, the library that torch's profiler uses, prints lines at its start and end.
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")
        self._device = device
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def stop(self) -> None:
        """Wait until the GPU has finished its queued work, and end the recording."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profiler.stop()

    def export(self) -> dict[str, Any]:
        """Return the recording as a Chrome trace, a dict with the key ``traceEvents``."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            # Names of kernels may contain any bytes.
            return json.loads(path.read_text(encoding="utf-8", errors="replace"))


def find_steps(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """Return (start, end) of each step in a trace, in microseconds on the clock of the trace."""
    steps = []
    for event in events:
        # On a GPU, the trace has a second event with the same name but a different category, for the kernels.
        if event.get("cat") == "user_annotation" and event["name"].startswith(STEP):
            steps.append((event["ts"], event["ts"] + event["dur"]))
    return sorted(steps)


def find_collectives(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """Return (start, end) of each gloo collective in a trace, in microseconds on the clock of the trace."""
    collectives = []
    for event in events:
        if event.get("ph") == "X" and event["name"].startswith("gloo:"):
            collectives.append((event["ts"], event["ts"] + event["dur"]))
    return collectives


def add_thread_phases(
    trace: Mapping[str, Any], spans: Iterable[Span], main_thread: int, clock_offset: float
) -> dict[str, Any]:
    """Return a copy of a trace with the phases of further threads, because torch's profiler does not record them.

    Args:
        trace: the Chrome trace of this process.
        spans: phases of all threads.
        main_thread: id of the thread whose phases the trace already contains.
        clock_offset: clock of the trace minus `time.perf_counter`, in microseconds.
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
    """Write a Chrome trace as a gzip file, which Perfetto can open.

    Raises:
        CreditError: if the file cannot be written.
    """

    def write(temporary: Path) -> None:
        with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=6) as file:
            json.dump(trace, file)

    atomic_write(path, write)
