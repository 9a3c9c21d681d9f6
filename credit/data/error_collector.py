"""Collector of errors, so that a user sees all problems at once instead of only the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from credit.errors import ConfigError, DataError

# Number of messages that the common error contains.
_MAX_SHOWN = 20


class MultipleErrors(DataError):
    """Several errors raised as one.

    Args:
        text: message of the common error, which lists the messages of the single errors.
        problems: messages of the single errors.

    Attributes:
        problems: messages of the single errors.
    """

    def __init__(self, text: str, problems: list[str]) -> None:
        super().__init__(text)
        self.problems = list(problems)


class ErrorCollector:
    """Collector of error messages, in the order in which the errors occurred.

    Attributes:
        messages: the messages, each only once.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        """Add the message of a problem, unless it is there already."""
        if message not in self.messages:
            self.messages.append(message)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context that catches `ConfigError` and `DataError` and adds the message; other errors are raised."""
        try:
            yield
        except MultipleErrors as error:
            # Its problems are added one by one, so that each is listed only once.
            for message in error.problems:
                self.add(message)
        except (ConfigError, DataError) as error:
            self.add(str(error))

    def raise_any(self) -> None:
        """Raise one error for all collected messages; do nothing if there are none.

        Raises:
            MultipleErrors: if there are messages. Its text shows at most 20; `MultipleErrors.problems` has all.
        """
        if not self.messages:
            return
        if len(self.messages) == 1:
            raise MultipleErrors(self.messages[0], self.messages)
        lines = [f"{len(self.messages)} problems", *self.messages[:_MAX_SHOWN]]
        if len(self.messages) > _MAX_SHOWN:
            lines.append(f"and {len(self.messages) - _MAX_SHOWN} more")
        raise MultipleErrors("\n  - ".join(lines), self.messages)
