"""What a check has found: problems, and lines about what is in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from credit.data.error_collector import ErrorCollector
from credit.errors import CreditError


class CheckReport(ErrorCollector):
    """Problems of every kind that a command addresses to the user.

    Args:
        say: receives a line for each thing that was looked at.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self.say = say

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Note what the block raises for the user and go on behind the block."""
        try:
            with super().collect():
                yield
        except CreditError as error:
            self.add(str(error))
