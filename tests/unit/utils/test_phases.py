"""Marks of phases reach the active recorder, and do nothing without a recorder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from credit.utils.profiling.phases import Phase, begin_step, in_phase, phase, recorded_by


class EventList:
    """Recorder that lists its events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def span(self, name: Phase) -> Iterator[None]:
        self.events.append(f"begin {name}")
        try:
            yield
        finally:
            self.events.append(f"end {name}")

    def begin_step(self, step: int) -> None:
        self.events.append(f"step {step}")


@in_phase(Phase.OPTIMIZER)
def double(number: int, *, fails: bool = False) -> int:
    """Return twice the number."""
    with phase(Phase.COMMUNICATION):
        if fails:
            raise ValueError
        return 2 * number


def test_marks_reach_the_recorder() -> None:
    recorder = EventList()
    with recorded_by(recorder):
        begin_step(7)
        assert double(3) == 6
        with pytest.raises(ValueError):
            double(3, fails=True)
    inner = ["begin communication", "end communication"]
    assert recorder.events == ["step 7", *(["begin optimizer", *inner, "end optimizer"] * 2)]


def test_nothing_is_recorded_before_and_after() -> None:
    outer, inner = EventList(), EventList()
    assert double(3) == 6
    with recorded_by(outer):
        with pytest.raises(ValueError), recorded_by(inner):
            raise ValueError
        begin_step(1)
    begin_step(2)
    assert double.__doc__ == "Return twice the number."
    assert outer.events == ["step 1"] and inner.events == []
    # Without a recorder, all marks share one object, so they cost almost no time.
    assert phase(Phase.FORWARD) is phase(Phase.LOADER)
