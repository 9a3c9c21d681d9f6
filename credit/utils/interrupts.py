"""Start of child processes that ignore Ctrl-C, so that only the parent process decides when to stop."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def start_without_interrupts(process: BaseProcess) -> None:
    """Start a process that never receives SIGINT.

    At Ctrl-C, a terminal sends SIGINT to every process of a command. A worker process that does not handle SIGINT would
    end with a traceback. The parent process still receives the signal. A signal that arrives while the process is being
    started is delivered after the start.

    Args:
        process: a process that has not been started.
    """
    # The resource tracker is started first, because its start unblocks SIGINT.
    resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # The child process inherits the blocked signals of this thread.
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
