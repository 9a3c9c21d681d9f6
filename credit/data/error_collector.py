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
        text: the common message.
        problems: messages of the errors.

    Attributes:
        problems: messages of the errors.
    """

    def __init__(self, text: str, problems: list[str]) -> None:
        super().__init__(text)
        self.problems = list(problems)


class ErrorCollector:
    """Collector of messages of errors, in the order in which they occurred, each only once.

    Attributes:
        messages: the messages.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        """Add the message of a problem, unless it is there already."""
        if message not in self.messages:
            self.messages.append(message)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context that catches an error for the user (`ConfigError`, `DataError`) and adds its message."""
        try:
            yield
        # An error of several problems is added problem by problem, so that each is listed once.
        except MultipleErrors as error:
            for message in error.problems:
                self.add(message)
        except (ConfigError, DataError) as error:
            self.add(str(error))

    def raise_any(self) -> None:
        """Raise one error with all messages.

        Raises:
            MultipleErrors: if there are any messages. The text shows at most 20; `MultipleErrors.problems` has all.
        """
        if not self.messages:
            return
        if len(self.messages) == 1:
            raise MultipleErrors(self.messages[0], self.messages)
        lines = [f"{len(self.messages)} problems", *self.messages[:_MAX_SHOWN]]
        if len(self.messages) > _MAX_SHOWN:
            lines.append(f"and {len(self.messages) - _MAX_SHOWN} more")
        raise MultipleErrors("\n  - ".join(lines), self.messages)
