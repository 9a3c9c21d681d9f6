"""Requests to stop: a signal, the file STOP, or the end of the walltime. Looked at between steps only."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_MARGIN_SECONDS = 60.0


class StopRequest:
    """Knows whether the run should save and end.

    Args:
        folder: the run's folder, where a file named STOP is a request.
        walltime_seconds: stop this long after the start, less a minute and the longest save and step so far.
    """

    def __init__(self, folder: Path, walltime_seconds: float | None) -> None:
        self._file = folder / "STOP"
        self._deadline = None if walltime_seconds is None else time.monotonic() + walltime_seconds
        self._signal: str | None = None
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}

    def reason(self, save_seconds: float, step_seconds: float) -> str | None:
        """Return why to stop now, None to go on."""
        if self._signal is not None:
            return f"signal {self._signal}"
        if self._file.exists():
            self._file.unlink(missing_ok=True)
            return "file STOP"
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left < save_seconds + step_seconds + _MARGIN_SECONDS:
                return "walltime"
        return None

    def restore(self) -> None:
        """Give the signals back to who had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            # a second signal means now
            raise KeyboardInterrupt
        self._signal = signal.Signals(number).name
