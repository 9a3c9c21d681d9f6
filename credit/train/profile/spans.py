"""Recorded phases of a training step, and the seconds of each phase without its inner phases.

Times are those of `time.perf_counter`, in seconds.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from credit.utils.profiling.phases import Phase

Interval = tuple[float, float]
# Phases whose inner phases are not counted separately.
CLOSED_PHASES = (Phase.CHECKPOINT, Phase.VALIDATION)


class Span(NamedTuple):
    """One execution of a phase.

    Attributes:
        name: the phase.
        start: time at which it begins.
        end: time at which it ends.
        thread: id of its thread, as the operating system numbers threads.
        processor: processor time of the thread in it, in seconds.
    """

    name: Phase
    start: float
    end: float
    thread: int
    processor: float = 0.0


class SpanRecorder:
    """Recorder of the phases of all threads.

    Attributes:
        spans: the phases that have ended, in the order of their ends.
        main_thread: id of the thread that built the recorder, which takes the steps.
        traces: True while the profiler of torch records; phases of the main thread then show in its timeline.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.main_thread = threading.get_native_id()
        self.traces = False

    @contextmanager
    def span(self, name: Phase) -> Iterator[None]:
        """Record the block as a phase of the calling thread."""
        thread = threading.get_native_id()
        annotation = None
        if self.traces and thread == self.main_thread:
            annotation = torch.profiler.record_function(name)
            annotation.__enter__()
        start, processor_start = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            processor = time.thread_time() - processor_start
            self.spans.append(Span(name, start, time.perf_counter(), thread, processor))
            if annotation is not None:
                annotation.__exit__(None, None, None)


@dataclass(frozen=True)
class StepAccount:
    """Seconds of the main thread in some steps.

    Attributes:
        wall: seconds of the steps.
        seconds: phase -> seconds in it and in no inner phase.
        processor: phase -> processor time of the thread in it and in no inner phase; without phases that only begin or
            only end in the windows.
        communication: phase -> seconds of the communication inside of it, a division of that of `seconds`.
    """

    wall: float
    seconds: dict[Phase, float]
    processor: dict[Phase, float]
    communication: dict[Phase | None, float]


def account_for(spans: Iterable[Span], windows: Sequence[Interval]) -> StepAccount:
    """Return the seconds of each phase in some windows of time.

    Args:
        spans: phases of one thread; any two of them are nested or do not overlap.
        windows: (start, end) of the steps.
    """
    # Consecutive steps become one window, which makes the search in them short.
    windows = merge_intervals(windows)
    seconds: dict[Phase, float] = defaultdict(float)
    processor: dict[Phase, float] = defaultdict(float)
    communication: dict[Phase | None, float] = defaultdict(float)
    # Open phases, from the outermost; each with the phase whose account its time goes to.
    stack: list[tuple[Span, Phase]] = []
    # An outer phase begins no later than an inner one, and ends no earlier.
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while stack and stack[-1][0].end <= span.start:
            stack.pop()
        length = _overlap((span.start, span.end), windows)
        span_processor = span.processor if length == span.end - span.start else 0.0
        name = span.name
        if stack:
            _, outer_name = stack[-1]
            seconds[outer_name] -= length
            processor[outer_name] -= span_processor
            if outer_name in CLOSED_PHASES:
                name = outer_name
            if outer_name == Phase.COMMUNICATION:
                # A wait inside of a wait is already counted for the phase around both.
                name = Phase.COMMUNICATION
            elif name == Phase.COMMUNICATION:
                communication[outer_name] += length
        elif name == Phase.COMMUNICATION:
            communication[None] += length
        seconds[name] += length
        processor[name] += span_processor
        stack.append((span, name))
    wall = sum(end - start for start, end in windows)
    return StepAccount(wall, dict(seconds), dict(processor), dict(communication))


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of some intervals as disjoint intervals in increasing order, without empty ones."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions of intervals, each disjoint and in increasing order."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        # The interval that ends first overlaps nothing more.
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the part of a union of intervals that is outside of another, each disjoint and in increasing order."""
    if not first:
        return []
    # The gaps between the intervals of the second union, up to the ends of the first one.
    gaps: list[Interval] = []
    gap_start = min(first[0][0], second[0][0]) if second else first[0][0]
    for start, end in second:
        if gap_start < start:
            gaps.append((gap_start, start))
        gap_start = end
    if gap_start < first[-1][1]:
        gaps.append((gap_start, first[-1][1]))
    return intersect(first, gaps)


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of all intervals together."""
    return sum(end - start for start, end in intervals)


def _overlap(interval: Interval, windows: Sequence[Interval]) -> float:
    """Return the length of an interval inside of some windows."""
    start, end = interval
    return sum(max(0.0, min(end, window_end) - max(start, window_start)) for window_start, window_end in windows)
