"""End an interrupted command (Ctrl-C, SIGINT) with one line on standard error and exit status 130."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

# 128 + SIGINT: the exit status that shells report for a process that Ctrl-C has ended.
INTERRUPTED = 128 + signal.SIGINT
# After an interrupt of the main thread, asyncio logs unfinished tasks of zarr, and concurrent.futures logs unfinished
# work.
_NOISY_LOGGERS = ("asyncio", "concurrent.futures")

# Delay after which a lost KeyboardInterrupt is raised again. It is long enough for the hook that caught it to return.
_RETRY_SECONDS = 0.01


class InterruptGuard:
    """Context manager that raises a KeyboardInterrupt in the main thread after SIGINT and silences other threads.

    Python's default handler causes three problems in these commands. A KeyboardInterrupt in a destructor is printed and
    then lost. Libraries replace a KeyboardInterrupt with other errors. Threads that are still running after the main
    thread has ended print tracebacks.

    If SIGINT is ignored (``nohup``, background jobs) or has a handler other than Python's default, nothing is changed.

    Attributes:
        interrupted: True as soon as SIGINT has arrived.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._is_installed = False
        # Hooks that were installed before the guard. The guard passes all errors that no interrupt has caused to them.
        self._previous_unraisable_hook: Any = sys.unraisablehook
        self._previous_thread_hook: Any = threading.excepthook

    def __enter__(self) -> InterruptGuard:
        # Only the main thread may set signal handlers.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous_unraisable_hook = sys.unraisablehook
            self._previous_thread_hook = threading.excepthook
            sys.unraisablehook = self._handle_unraisable
            threading.excepthook = self._handle_thread_error
            signal.signal(signal.SIGINT, self._handle_signal)
            self._is_installed = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = self._previous_unraisable_hook
            threading.excepthook = self._previous_thread_hook
            self._is_installed = False

    def silence_threads(self) -> None:
        """Set `interrupted`, and suppress the messages of other threads about their unfinished work."""
        self.interrupted = True
        for name in _NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler that raises a KeyboardInterrupt in the main thread."""
        self.silence_threads()
        raise KeyboardInterrupt

    def _handle_unraisable(self, unraisable: Any) -> None:
        """Raise a KeyboardInterrupt again in the main thread if Python lost it in a destructor or a callback of C code.

        Other errors of destructors and callbacks are printed, unless the command was interrupted.
        """
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # An exception raised in this hook would be lost again, so a timer raises it after the hook has returned.
            timer = threading.Timer(_RETRY_SECONDS, _thread.interrupt_main)
            timer.daemon = True
            timer.start()
        elif not self.interrupted:
            self._previous_unraisable_hook(unraisable)

    def _handle_thread_error(self, error: Any) -> None:
        """Print the error of a thread, unless the thread failed because the main thread was interrupted."""
        if not self.interrupted:
            self._previous_thread_hook(error)


def end_process() -> NoReturn:
    """Terminate the child processes and end this process with exit status 130, without waiting for its threads.

    Call this function after all context managers have cleaned up. The interpreter's normal shutdown would wait for
    running threads and print their error messages.
    """
    # Child processes of multiprocessing exist only if the module has been imported.
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        for child in multiprocessing.active_children():
            child.terminate()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            # The stream is None, closed, or a pipe without a reader.
            continue
    os._exit(INTERRUPTED)
