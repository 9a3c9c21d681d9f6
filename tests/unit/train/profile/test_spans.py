"""Tests of accounts of spans, against known values, and of interval arithmetic, against sets of unit cells."""

from __future__ import annotations

import random
import time

import pytest

from credit.train.profile.spans import (
    Interval,
    Span,
    SpanRecorder,
    compute_phase_times,
    intersect_intervals,
    merge_intervals,
    subtract_intervals,
    total_length,
)
from credit.utils.profiling.phases import Phase

THREAD = 1


def build_span(name: Phase, start: float, end: float, processor: float = 0.0) -> Span:
    return Span(name, start, end, THREAD, processor)


def test_time_of_inner_phases_is_not_counted_for_outer_ones() -> None:
    spans = [
        build_span(Phase.LOADER, 0, 1, 0.5),
        build_span(Phase.FORWARD, 1, 8, 6),
        build_span(Phase.COMMUNICATION, 2, 3, 0.1),
        build_span(Phase.BACKWARD, 4, 8, 3.5),
        build_span(Phase.COMMUNICATION, 5, 7, 0.2),
    ]
    # The order in which spans are recorded does not matter.
    account = compute_phase_times(reversed(spans), [(0, 10)])
    assert account.wall == 10
    assert account.seconds == {Phase.LOADER: 1, Phase.FORWARD: 2, Phase.COMMUNICATION: 3, Phase.BACKWARD: 2}
    assert account.communication == {Phase.FORWARD: 1, Phase.BACKWARD: 2}
    assert account.processor_seconds == pytest.approx(
        {Phase.LOADER: 0.5, Phase.FORWARD: 2.4, Phase.COMMUNICATION: 0.3, Phase.BACKWARD: 3.3}
    )


def test_validation_and_checkpoint_are_not_divided() -> None:
    spans = [
        build_span(Phase.VALIDATION, 0, 10),
        build_span(Phase.LOADER, 1, 4),
        build_span(Phase.COMMUNICATION, 2, 3),
        build_span(Phase.CHECKPOINT, 10, 12),
        build_span(Phase.COMMUNICATION, 11, 12),
    ]
    account = compute_phase_times(spans, [(0, 12)])
    assert {name: seconds for name, seconds in account.seconds.items() if seconds} == {
        Phase.VALIDATION: 10,
        Phase.CHECKPOINT: 2,
    }
    assert not account.communication


def test_only_time_inside_of_the_steps_is_counted() -> None:
    spans = [build_span(Phase.LOADER, -1, 1), build_span(Phase.FORWARD, 3, 7), build_span(Phase.OPTIMIZER, 9, 12)]
    account = compute_phase_times(spans, [(0, 4), (6, 10)])
    assert account.wall == 8
    assert account.seconds == {Phase.LOADER: 1, Phase.FORWARD: 2, Phase.OPTIMIZER: 1}


def test_nested_waits_are_counted_once() -> None:
    spans = [
        build_span(Phase.BACKWARD, 0, 9),
        build_span(Phase.COMMUNICATION, 1, 5),
        build_span(Phase.COMMUNICATION, 2, 4),
    ]
    account = compute_phase_times(spans, [(0, 10)])
    assert account.seconds == {Phase.BACKWARD: 5, Phase.COMMUNICATION: 4}
    assert account.communication == {Phase.BACKWARD: 4}


def test_recorder_measures_time_and_processor_time() -> None:
    recorder = SpanRecorder()
    with recorder.span(Phase.FORWARD):
        with recorder.span(Phase.LOADER):
            time.sleep(0.05)
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
    account = compute_phase_times(recorder.spans, [(recorder.spans[-1].start, recorder.spans[-1].end)])
    assert sum(account.seconds.values()) == pytest.approx(account.wall)
    assert account.seconds[Phase.LOADER] >= 0.05 > account.processor_seconds[Phase.LOADER]
    assert 0.05 <= account.processor_seconds[Phase.FORWARD] <= account.seconds[Phase.FORWARD]


def test_a_failed_phase_is_recorded() -> None:
    recorder = SpanRecorder()
    with pytest.raises(StopIteration), recorder.span(Phase.LOADER):
        raise StopIteration
    assert [span.name for span in recorder.spans] == [Phase.LOADER]


def unit_cells(intervals: list[Interval]) -> set[int]:
    """Return the cells of length 1 inside of intervals with whole ends."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


def random_intervals(generator: random.Random) -> list[Interval]:
    intervals = []
    for _ in range(generator.randrange(6)):
        start = generator.randrange(30)
        intervals.append((float(start), float(start + generator.randrange(8))))
    return intervals


def test_interval_arithmetic_equals_sets_of_cells() -> None:
    generator = random.Random(0)
    for _ in range(500):
        raw_first, raw_second = random_intervals(generator), random_intervals(generator)
        first, second = merge_intervals(raw_first), merge_intervals(raw_second)
        assert unit_cells(first) == unit_cells(raw_first)
        assert total_length(first) == len(unit_cells(first))
        assert unit_cells(intersect_intervals(first, second)) == unit_cells(first) & unit_cells(second)
        assert total_length(intersect_intervals(first, second)) == len(unit_cells(first) & unit_cells(second))
        assert unit_cells(subtract_intervals(first, second)) == unit_cells(first) - unit_cells(second)
        assert total_length(subtract_intervals(first, second)) == len(unit_cells(first) - unit_cells(second))
