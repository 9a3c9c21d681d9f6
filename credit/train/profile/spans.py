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
# Phases that include the time of their inner phases.
CLOSED_PHASES = (Phase.CHECKPOINT, Phase.VALIDATION)


class Span(NamedTuple):
    """One execution of a phase.

    Attributes:
        name: the phase.
        start: time at which the phase begins.
        end: time at which the phase ends.
        thread: id of the thread in the operating system.
        processor_seconds: processor time of the thread during the phase, in seconds.
    """

    name: Phase
    start: float
    end: float
    thread: int
    processor_seconds: float = 0.0


class SpanRecorder:
    """Recorder of the phases of all threads.

    Attributes:
        spans: the phases that have ended, in the order of their ends.
        main_thread: id of the thread that built the recorder; this thread runs the training steps.
        is_tracing: True while the profiler of torch records; its timeline then includes the phases of the main thread.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.main_thread = threading.get_native_id()
        self.is_tracing = False

    @contextmanager
    def span(self, name: Phase) -> Iterator[None]:
        """Context manager that records the ``with`` block as a phase of the calling thread."""
        thread = threading.get_native_id()
        annotation = None
        if self.is_tracing and thread == self.main_thread:
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
    """Time of the main thread in each phase, summed over some steps.

    Attributes:
        wall: elapsed seconds of the steps.
        seconds: phase -> seconds in this phase, without its inner phases.
        processor_seconds: phase -> processor seconds in this phase, without its inner phases. Phases that are only
            partly inside the steps are ignored.
        communication: phase -> seconds of communication inside this phase; the key None is communication outside of all
            other phases. The sum over all keys is the communication in `seconds`.
    """

    wall: float
    seconds: dict[Phase, float]
    processor_seconds: dict[Phase, float]
    communication: dict[Phase | None, float]


def compute_phase_times(spans: Iterable[Span], windows: Sequence[Interval]) -> StepAccount:
    """Return the seconds of each phase within some time windows.

    Args:
        spans: phases of one thread; any two phases are nested or do not overlap.
        windows: (start, end) of the steps.
    """
    # Consecutive steps are merged into one window, so that the search in the windows is short.
    windows = merge_intervals(windows)
    seconds: dict[Phase, float] = defaultdict(float)
    processor: dict[Phase, float] = defaultdict(float)
    communication: dict[Phase | None, float] = defaultdict(float)
    # Stack of open phases, the outermost phase first, each with the phase that its time is added to.
    stack: list[tuple[Span, Phase]] = []
    # An outer phase begins no later than an inner one, and ends no earlier.
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while stack and stack[-1][0].end <= span.start:
            stack.pop()
        length = _compute_overlap((span.start, span.end), windows)
        span_processor = span.processor_seconds if length == span.end - span.start else 0.0
        name = span.name
        if stack:
            _, outer_name = stack[-1]
            seconds[outer_name] -= length
            processor[outer_name] -= span_processor
            if outer_name in CLOSED_PHASES:
                name = outer_name
            if outer_name == Phase.COMMUNICATION:
                # The outer wait has already been added to the communication of the enclosing phase.
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
    """Return the union of intervals as disjoint intervals in increasing order; empty intervals are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect_intervals(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists of intervals; each list is disjoint and in increasing order."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        # The interval that ends first cannot overlap any later interval.
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract_intervals(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the parts of the intervals in `first` that no interval in `second` covers.

    Args:
        first: disjoint intervals in increasing order.
        second: disjoint intervals in increasing order.
    """
    if not first:
        return []
    # Gaps between the intervals of `second`, within the range of `first`.
    gaps: list[Interval] = []
    gap_start = min(first[0][0], second[0][0]) if second else first[0][0]
    for start, end in second:
        if gap_start < start:
            gaps.append((gap_start, start))
        gap_start = end
    if gap_start < first[-1][1]:
        gaps.append((gap_start, first[-1][1]))
    return intersect_intervals(first, gaps)


def total_length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of all intervals."""
    return sum(end - start for start, end in intervals)


def _compute_overlap(interval: Interval, windows: Sequence[Interval]) -> float:
    """Return the length of the part of an interval that is inside the windows."""
    start, end = interval
    return sum(max(0.0, min(end, window_end) - max(start, window_start)) for window_start, window_end in windows)
