"""Requests to stop: a signal, the file STOP, or the end of the job's time. Looked at between steps only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from credit.errors import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# when the job ends, seconds since 1970; job scripts export it
JOB_END = "CREDIT_JOB_END"
_MARGIN_SECONDS = 60.0


class StopSignal:
    """Knows whether the run should save and end; a context manager that holds the signals.

    It is entered as early as can be, so that no signal comes before it.

    Args:
        folder: the run's folder, where a file named STOP is a request; None on all ranks but one, as a thousand ranks
            that look at every step are a load for a file system.
        walltime_seconds: stop in time before so much has passed.
        environ: in which CREDIT_JOB_END may name another end; the earlier one counts.

    Raises:
        ConfigError: if CREDIT_JOB_END is no time.
    """

    def __init__(
        self, folder: Path | None, walltime_seconds: float | None, environ: Mapping[str, str] = os.environ
    ) -> None:
        ends = {}
        if walltime_seconds is not None:
            ends["walltime"] = time.monotonic() + walltime_seconds
        if environ.get(JOB_END):
            ends["end of the job"] = time.monotonic() + _seconds_left(environ[JOB_END])
        self._end = min(ends.items(), key=lambda item: item[1], default=None)
        self._file = None if folder is None else folder / "STOP"
        self._signal: str | None = None
        self._found: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def reason(self, ahead_seconds: float) -> str | None:
        """Return why to stop now, None to go on.

        Args:
            ahead_seconds: what a save and the next step take; the run stops that long and a minute before its end.
        """
        if self._found is None:
            self._found = self._look(ahead_seconds)
        return self._found

    def _look(self, ahead_seconds: float) -> str | None:
        if self._signal is not None:
            return f"signal {self._signal}"
        # not `Path.exists`, which raises where a file system fails for a moment
        if self._file is not None and os.path.exists(self._file):
            self._file.unlink(missing_ok=True)
            return "file STOP"
        if self._end is not None and self._end[1] - time.monotonic() < ahead_seconds + _MARGIN_SECONDS:
            return self._end[0]
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            # a second signal means now
            raise KeyboardInterrupt
        self._signal = signal.Signals(number).name


def _seconds_left(end: str) -> float:
    try:
        return float(end) - time.time()
    except ValueError as error:
        raise ConfigError(
            f"{JOB_END}={end!r} is no time; the job script sets it to seconds since 1970, as `date +%s` counts"
        ) from error
