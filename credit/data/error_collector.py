"""Collects problems instead of stopping at the first, so that one look at a message is enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from credit.errors import ConfigError, DataError

_MOST_SHOWN = 20


class MultipleErrors(DataError):
    """A DataError that stands for several.

    Attributes:
        problems: their messages.
    """

    def __init__(self, text: str, problems: list[str]) -> None:
        super().__init__(text)
        self.problems = list(problems)


class ErrorCollector:
    """Messages in the order in which they were met, each once."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        """Note a problem."""
        if message not in self.messages:
            self.messages.append(message)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Note what the block raises for the user and go on behind the block."""
        try:
            yield
        except (ConfigError, DataError) as error:
            for message in error.problems if isinstance(error, MultipleErrors) else [str(error)]:
                self.add(message)

    def raise_any(self) -> None:
        """Raise one error with everything that was noted.

        Raises:
            SeveralProblems: if there are any.
        """
        if not self.messages:
            return
        shown = self.messages[:_MOST_SHOWN]
        if len(self.messages) > len(shown):
            shown.append(f"and {len(self.messages) - len(shown)} more")
        title = f"{len(self.messages)} problems"
        raise MultipleErrors(shown[0] if len(shown) == 1 else "\n  - ".join([title, *shown]), self.messages)
