"""Marks of the phases of a training step, such as forward and optimizer, for `credit train --profile`.

The code of a training step marks its phases with `phase` and `in_phase`, and its start with `begin_step`. Without a
recorder, each mark does nothing and takes a fraction of a microsecond. Phases may be nested; the time of an inner phase
is not included in the outer phase.
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
    """Interface of an object that records the phases of training steps."""

    def span(self, name: Phase) -> AbstractContextManager[object]:
        """Return a context manager that records a phase in the thread that enters it."""

    def begin_step(self, step: int) -> None:
        """Record the start of optimizer step `step` (from 0); called in the main thread, outside of any phase."""


_recorder: Recorder | None = None
# Context manager for all calls without a recorder; it is shared, because building it takes longer than entering it.
_NO_PHASE = nullcontext()


def phase(name: Phase) -> AbstractContextManager[object]:
    """Return a context manager that marks its ``with`` block as a phase of the training step."""
    if _recorder is None:
        return _NO_PHASE
    return _recorder.span(name)


def in_phase(name: Phase) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that marks each call of the decorated function as a phase of the training step."""

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
    """Mark the start of optimizer step `step` (from 0); a step ends when the next step starts."""
    if _recorder is not None:
        _recorder.begin_step(step)


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Context manager in which `recorder` records the phases of all threads."""
    global _recorder
    previous_recorder = _recorder
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = previous_recorder
