"""Collector of errors, so that a user sees all problems at once instead of only the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from credit.errors import ConfigError, DataError

_MAX_SHOWN = 20


class MultipleErrors(DataError):
    """Several errors raised as one.

    Attributes:
        problems: messages of the errors.
    """

    def __init__(self, text: str, problems: list[str]) -> None:
        super().__init__(text)
        self.problems = list(problems)


class ErrorCollector:
    """Messages of errors in the order in which they occurred, each only once."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        """Add the message of a problem."""
        if message not in self.messages:
            self.messages.append(message)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Catch an error for the user that the block raises, and add its message."""
        try:
            yield
        except MultipleErrors as error:
            for message in error.problems:
                self.add(message)
        except (ConfigError, DataError) as error:
            self.add(str(error))

    def raise_any(self) -> None:
        """Raise one error with all messages.

        Raises:
            MultipleErrors: if there are any messages.
        """
        if not self.messages:
            return
        if len(self.messages) == 1:
            raise MultipleErrors(self.messages[0], self.messages)
        lines = [f"{len(self.messages)} problems", *self.messages[:_MAX_SHOWN]]
        if len(self.messages) > _MAX_SHOWN:
            lines.append(f"and {len(self.messages) - _MAX_SHOWN} more")
        raise MultipleErrors("\n  - ".join(lines), self.messages)
