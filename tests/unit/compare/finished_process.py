"""Stand-in for a process that has ended, for tests of the reaction to its exit code."""

from __future__ import annotations


class FinishedProcess:
    """Stand-in for `subprocess.Popen`.

    Args:
        exit_code: exit code of the process.
    """

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code

    def poll(self) -> int:
        """Return the exit code."""
        return self._exit_code
