"""Collector of errors, so that a user sees all problems at once instead of only the first problem."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from credit.errors import ConfigError, DataError

# Largest number of messages in the text of a `MultipleErrors`.
_MAX_SHOWN = 20


class MultipleErrors(DataError):
    """Error that combines several errors.

    Args:
        text: message of the combined error, which lists the messages of the individual errors.
        problems: messages of the individual errors.

    Attributes:
        problems: messages of the individual errors.
    """

    def __init__(self, text: str, problems: list[str]) -> None:
        super().__init__(text)
        self.problems = list(problems)


class ErrorCollector:
    """Collector of error messages, in the order in which the errors occurred.

    Attributes:
        messages: the collected messages, without duplicates.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        """Add the message of a problem, unless the same message has been added before."""
        if message not in self.messages:
            self.messages.append(message)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Return a context that catches `ConfigError` and `DataError` and adds their messages; other errors pass."""
        try:
            yield
        except MultipleErrors as error:
            # The problems are added one by one, so that each message is listed only once.
            for message in error.problems:
                self.add(message)
        except (ConfigError, DataError) as error:
            self.add(str(error))

    def raise_any(self) -> None:
        """Raise one error with all collected messages; do nothing if there are no messages.

        Raises:
            MultipleErrors: if there are messages. The text of the error contains at most 20 messages, and
                `MultipleErrors.problems` contains all messages.
        """
        if not self.messages:
            return
        if len(self.messages) == 1:
            raise MultipleErrors(self.messages[0], self.messages)
        lines = [f"{len(self.messages)} problems", *self.messages[:_MAX_SHOWN]]
        if len(self.messages) > _MAX_SHOWN:
            lines.append(f"and {len(self.messages) - _MAX_SHOWN} more")
        raise MultipleErrors("\n  - ".join(lines), self.messages)
