"""Keep Ctrl-C away from child processes, so that their parent alone decides when to stop."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def start_without_interrupts(process: BaseProcess) -> None:
    """Start a process that never receives SIGINT.

    A terminal sends Ctrl-C as SIGINT to every process of a command, and a worker that does not handle it would end with
    a traceback. The parent still receives the signal. If it arrives during the start, it is delivered afterwards.

    Args:
        process: a process that has not been started.
    """
    # The first start of a process would start the resource tracker, which unblocks SIGINT.
    resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # The child inherits the signals that this thread blocks.
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
