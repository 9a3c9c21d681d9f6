"""Separate thread for each logger, so that a slow network or a failing server cannot slow down or stop training."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from credit.config.redact import hide_secrets, redact
from credit.train.loggers.base import LoggedPicture, LoggedRow, LoggedRun, RunLogger

logger = logging.getLogger(__name__)

# Largest number of rows and pictures in the queue of a logger. If the queue is full, new rows are dropped.
_MAX_WAITING = 20_000
# Largest number of rows that a logger gets in one call.
_MAX_ROWS = 200
# Seconds that a run waits for its loggers at the end. The remaining time of the job may be little more than a minute.
CLOSE_SECONDS = 30.0


@dataclass(frozen=True)
class _CloseRequest:
    """Last item of the queue, with the status of the run at its end."""

    status: str


class BackgroundLogger:
    """Queue of rows and pictures for a logger, and the thread that sends them to the logger.

    Only the first error of the logger is logged, as a warning. If the start of the logger fails, it is not used until
    the run is started again. After any other error, the logger still gets later rows.

    Args:
        name: entry of ``trainer.loggers``, for messages.
        run_logger: the logger; the thread of this object starts it.
        run: description of the run.
    """

    def __init__(self, name: str, run_logger: RunLogger, run: LoggedRun) -> None:
        self._name = name
        self._logger = run_logger
        self._run = run
        self._queue: queue.SimpleQueue[LoggedRow | LoggedPicture | _CloseRequest] = queue.SimpleQueue()
        self._has_warned = False
        # A daemon thread does not keep the process alive if the logger hangs.
        self._thread = threading.Thread(target=self._send_queue, name=f"logger {name}", daemon=True)
        self._thread.start()

    def log(self, row: LoggedRow) -> None:
        """Put a row into the queue of the logger, without waiting for the logger."""
        self._put(row)

    def log_image(self, picture: LoggedPicture) -> None:
        """Put a picture into the queue of the logger, without waiting for the logger."""
        self._put(picture)

    def begin_close(self, status: str) -> None:
        """Request that the logger completes its record of the run after the queued rows; do not wait for the logger.

        Args:
            status: status of the run, see `RunLogger.close`.
        """
        # The end is added even to a full queue, because a slow logger would otherwise never close.
        self._queue.put(_CloseRequest(status))

    def join(self, deadline: float) -> None:
        """Wait until the logger has completed its record of the run; log a warning if the deadline passes before.

        Args:
            deadline: value of `time.monotonic` at which the wait ends.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"did not finish within {CLOSE_SECONDS:g} s; its last rows may be missing")

    def _put(self, item: LoggedRow | LoggedPicture) -> None:
        """Append an item to the queue; if the queue is full, drop the item and log a warning."""
        if self._queue.qsize() < _MAX_WAITING:
            self._queue.put(item)
        else:
            self._warn(f"is too slow: {_MAX_WAITING} rows are in the queue, and further rows are dropped")

    def _send_queue(self) -> None:
        """Start the logger, and pass it all items of the queue until the end of the run; this runs in the thread."""
        try:
            address = self._logger.start(self._run)
        # The library of the logger may raise any exception, and training must continue.
        except Exception as error:
            self._warn(f"not used: {_describe(error)}")
            return
        # The user copies the address, which is a command or URL. The home folder is not replaced with ``~``, because
        # ``~`` may not work there.
        logger.info("logging to %s: %s", self._name, hide_secrets(address, os.environ))
        while True:
            item = self._queue.get()
            rows: list[LoggedRow] = []
            # All rows in the queue are sent together, because each request to a server takes a long time.
            while isinstance(item, LoggedRow):
                rows.append(item)
                if len(rows) == _MAX_ROWS or self._queue.empty():
                    break
                item = self._queue.get()
            try:
                if rows:
                    self._logger.log(rows)
                if isinstance(item, LoggedPicture):
                    self._logger.log_image(item)
                elif isinstance(item, _CloseRequest):
                    self._logger.close(item.status)
            except Exception as error:
                self._warn(f"failed, and rows may be missing: {_describe(error)}")
            if isinstance(item, _CloseRequest):
                return

    def _warn(self, problem: str) -> None:
        """Log a problem of the logger as a warning, unless a problem has been logged before."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "trainer.loggers: %s %s. Training continues; metrics.jsonl contains all rows", self._name, problem
            )


def close_loggers(loggers: Sequence[BackgroundLogger], status: str) -> None:
    """Close all loggers at the same time, and wait for all of them together at most `CLOSE_SECONDS`.

    Args:
        loggers: the loggers.
        status: status of the run, see `RunLogger.close`.
    """
    deadline = time.monotonic() + CLOSE_SECONDS
    for background_logger in loggers:
        background_logger.begin_close(status)
    for background_logger in loggers:
        background_logger.join(deadline)


def _describe(error: Exception) -> str:
    """Return the type and the first line of an error; secrets, such as a password in a server address, are hidden."""
    lines = str(error).splitlines()
    text = lines[0] if lines else ""
    return redact(f"{type(error).__name__}: {text}", os.environ)
