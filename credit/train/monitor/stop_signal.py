"""Requests to stop a run: a signal, the file STOP, or the time limit of the job.

A run checks for stop requests between two optimizer steps.
"""

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
# End of the job in seconds since 1970; job scripts export it.
JOB_END = "CREDIT_JOB_END"
# Time in seconds between the completion of the last save and the end of the job.
_MARGIN_SECONDS = 60.0


class StopSignal:
    """Context manager that installs signal handlers and collects requests to save and stop.

    Enter it as early as possible, so that no signal is missed.

    Args:
        folder: the run folder. A file named STOP in this folder is a request to stop. None on all ranks except one,
            because checks by many ranks at every step would slow down the file system.
        walltime_seconds: time limit of the run, from now on; None for no limit. The run stops before the limit.
        environ: environment variables. CREDIT_JOB_END may contain the end of the job in seconds since 1970. If both
            limits are set, the earlier limit applies.

    Raises:
        ConfigError: if CREDIT_JOB_END is not a number.
    """

    def __init__(
        self, folder: Path | None, walltime_seconds: float | None, environ: Mapping[str, str] = os.environ
    ) -> None:
        # name of the limit -> time of the monotonic clock, in seconds
        end_times = {}
        if walltime_seconds is not None:
            end_times["walltime"] = time.monotonic() + walltime_seconds
        if environ.get(JOB_END):
            end_times["end of the job"] = time.monotonic() + _seconds_left(environ[JOB_END])
        # (name, time) of the earlier end, None without a limit.
        self._end = min(end_times.items(), key=lambda item: item[1], default=None)
        self._stop_file = None if folder is None else folder / "STOP"
        self._signal: signal.Signals | None = None
        self._reason: str | None = None
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @property
    def is_interrupt(self) -> bool:
        """True if a person requested the stop with Ctrl-C."""
        return self._signal == signal.SIGINT

    def find_reason(self, ahead_seconds: float) -> str | None:
        """Return the reason to stop now, or None if the run may continue.

        When there is a reason, all later calls return the same reason.

        Args:
            ahead_seconds: seconds that a save and the next step take. The run stops if the remaining time is less than
                `ahead_seconds` plus one minute.
        """
        if self._reason is None:
            self._reason = self._look_for_reason(ahead_seconds)
        return self._reason

    def _look_for_reason(self, ahead_seconds: float) -> str | None:
        """Return the current reason to stop: a signal, the file STOP or a time limit; None if there is no reason."""
        if self._signal is not None:
            return f"signal {self._signal.name}"
        # `Path.exists` would raise where a file system fails for a moment.
        if self._stop_file is not None and os.path.exists(self._stop_file):
            # Remove the file, because the resumed run would otherwise stop at once.
            self._stop_file.unlink(missing_ok=True)
            return "file STOP"
        if self._end is not None:
            name, end = self._end
            if end - time.monotonic() < ahead_seconds + _MARGIN_SECONDS:
                return name
        return None

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the signal as a request to stop; raise KeyboardInterrupt at the second signal."""
        if self._signal is not None:
            # A user who sends a second signal does not want to wait for the save.
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)


def _seconds_left(end: str) -> float:
    """Return the seconds from now until `end`, a string with a number of seconds since 1970.

    Raises:
        ConfigError: if the string is not a number.
    """
    try:
        return float(end) - time.time()
    except ValueError as error:
        raise ConfigError(
            f"{JOB_END}={end!r} is not a time; the job script must set it to seconds since 1970 (`date +%s`)"
        ) from error
