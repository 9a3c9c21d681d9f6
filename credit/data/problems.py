"""Collects problems instead of stopping at the first, so that one look at a message is enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from credit.errors import ConfigError, CreditError, DataError

_MOST_SHOWN = 20


class Problems:
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
            self.note(error)

    def note(self, error: CreditError) -> None:
        """Note an error; one that stands for several problems counts as these."""
        for message in getattr(error, "problems", [str(error)]):
            self.add(message)

    def raise_any(self) -> None:
        """Raise one DataError with everything that was noted.

        Raises:
            DataError: with the problems as its attribute `problems`.
        """
        if not self.messages:
            return
        shown = self.messages[:_MOST_SHOWN]
        if len(self.messages) > len(shown):
            shown.append(f"and {len(self.messages) - len(shown)} more")
        text = shown[0] if len(shown) == 1 else "\n".join([f"{len(self.messages)} problems", *map("  - {}".format, shown)])
        error = DataError(text)
        error.problems = list(self.messages)
        raise error
