"""Thread around a logger, so that a slow network or a failing server does not slow or stop the training."""

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

# Rows and pictures that wait for a logger. With more, the newest are left out.
_MAX_WAITING = 20_000
# Rows that a logger gets at once at most.
_MAX_ROWS = 200
# Seconds that the end of a training waits for its loggers. The rest of a job's time may be little more than a minute.
CLOSE_SECONDS = 30.0


@dataclass(frozen=True)
class _End:
    """Mark behind the last row, with the state of the run."""

    status: str


class BackgroundLogger:
    """Queue before a logger, and the thread that empties it.

    The first error of the logger is logged as a warning, and later ones are not reported. If the start fails, the
    logger is not used until the run is started again. After another error, the logger still gets later rows.

    Args:
        name: entry of ``trainer.loggers``, for messages.
        run_logger: the logger, which has not been started.
        run: description of the run.
    """

    def __init__(self, name: str, run_logger: RunLogger, run: LoggedRun) -> None:
        self._name = name
        self._logger = run_logger
        self._run = run
        self._queue: queue.SimpleQueue[LoggedRow | LoggedPicture | _End] = queue.SimpleQueue()
        self._has_warned = False
        # A daemon thread does not keep the process alive if the logger hangs.
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def log(self, row: LoggedRow) -> None:
        """Hand a row to the logger, without waiting for it."""
        self._put(row)

    def log_image(self, picture: LoggedPicture) -> None:
        """Hand a picture to the logger, without waiting for it."""
        self._put(picture)

    def begin_close(self, status: str) -> None:
        """Let the logger complete its record, without waiting for it.

        Args:
            status: as for `RunLogger.close`.
        """
        # The end is not limited by the length of the queue: without it, a slow logger would never close its record.
        self._queue.put(_End(status))

    def join(self, deadline: float) -> None:
        """Wait until the logger has completed its record; log a warning if it has not by the deadline.

        Args:
            deadline: value of `time.monotonic` after which nothing waits.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"did not end within {CLOSE_SECONDS:g} s; its last rows may be missing")

    def _put(self, item: LoggedRow | LoggedPicture) -> None:
        """Append an item to the queue; leave it out with a warning if too many wait."""
        if self._queue.qsize() < _MAX_WAITING:
            self._queue.put(item)
        else:
            self._warn(f"is too slow: {_MAX_WAITING} rows wait, and rows are left out")

    def _work(self) -> None:
        """Start the logger and hand it everything that arrives in the queue, until its end."""
        try:
            address = self._logger.start(self._run)
        # A library and a network may raise anything, and the training must go on.
        except Exception as error:
            self._warn(f"not used: {_describe(error)}")
            return
        # The address is a command or URL to copy, in which ``~`` for the home folder may not work.
        logger.info("logging to %s: %s", self._name, hide_secrets(address, os.environ))
        while True:
            item = self._queue.get()
            rows: list[LoggedRow] = []
            # Rows that wait already are handed over together, because a request to a server takes long.
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
                elif isinstance(item, _End):
                    self._logger.close(item.status)
            except Exception as error:
                self._warn(f"failed, and rows may be missing: {_describe(error)}")
            if isinstance(item, _End):
                return

    def _warn(self, problem: str) -> None:
        """Log the first problem as a warning."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "trainer.loggers: %s %s. The training goes on; metrics.jsonl has all rows", self._name, problem
            )


def close_loggers(loggers: Sequence[BackgroundLogger], status: str) -> None:
    """Complete the records of all loggers at the same time, and wait for them at most `CLOSE_SECONDS`.

    Args:
        loggers: the loggers.
        status: as for `RunLogger.close`.
    """
    deadline = time.monotonic() + CLOSE_SECONDS
    for background_logger in loggers:
        background_logger.begin_close(status)
    for background_logger in loggers:
        background_logger.join(deadline)


def _describe(error: Exception) -> str:
    """Return the first line of an error, without secrets, such as a password in the address of a server."""
    lines = str(error).splitlines()
    text = lines[0] if lines else ""
    return redact(f"{type(error).__name__}: {text}", os.environ)
