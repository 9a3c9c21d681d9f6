"""Marks of the phases of a training step, such as forward and optimizer, for `credit train --profile`.

The code of a step marks its phases with `phase` and `in_phase`, and its begin with `begin_step`. Unless a recorder is
in use these marks do nothing, at a cost of a fraction of a microsecond each. Phases may be nested: the time of an inner
phase does not count for the outer one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Phase(StrEnum):
    """Phases that the code of a training step marks; the values are the names in tables and timelines."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    SPECTRAL_NORM = "spectral norm"
    OPTIMIZER = "optimizer"
    LOADER = "loader"
    COPY = "copy to device"
    LOGGING = "logging"
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"


class Recorder(Protocol):
    """Receiver of the marks."""

    def span(self, name: Phase) -> AbstractContextManager[object]:
        """Return a context that records a phase in the thread that enters it."""

    def begin_step(self, step: int) -> None:
        """Record that optimizer step `step` (from 0) begins, in the main thread and outside of any phase."""


_recorder: Recorder | None = None
# One object for all calls without a recorder, because building one would cost more than entering it.
_NO_PHASE = nullcontext()


def phase(name: Phase) -> AbstractContextManager[object]:
    """Return a context whose block is a phase of the training step."""
    if _recorder is None:
        return _NO_PHASE
    return _recorder.span(name)


def in_phase(name: Phase) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of functions whose calls are a phase of the training step."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run_in_phase(*args: P.args, **kwargs: P.kwargs) -> T:
            if _recorder is None:
                return function(*args, **kwargs)
            with _recorder.span(name):
                return function(*args, **kwargs)

        return run_in_phase

    return decorate


def begin_step(step: int) -> None:
    """Mark the begin of optimizer step `step` (from 0), which ends when the next one begins."""
    if _recorder is not None:
        _recorder.begin_step(step)


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Context in which `recorder` receives the marks of all threads."""
    global _recorder
    previous_recorder = _recorder
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = previous_recorder
