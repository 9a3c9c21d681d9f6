"""The report of ``credit check``: errors, warnings and notes, formatted as text or as JSON."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from credit.cli.console.terminal import colorize, wrap_text
from credit.data.error_collector import ErrorCollector
from credit.errors import CreditError

# Regular expression of a path that ends in the extension of a data file.
_FILE = re.compile(r"[^\s'\",;:()\[\]]+\.(?:nc4?|cdf|grib2?|grb2?|zarr|h5|hdf5)(?![\w.])")
_MAX_FILES_SHOWN = 3


class CheckReport(ErrorCollector):
    """Errors, warnings and notes of a check.

    A `CreditError` that is raised inside a `with` block of `collect` is added to the report and does not end the check.

    Args:
        show_note: function that displays a note; it is called as soon as a note is added. The default displays nothing.

    Attributes:
        messages: error messages without duplicates.
        warnings: messages about problems that do not stop a run, without duplicates.
        notes: sentences about successful checks.
    """

    def __init__(self, show_note: Callable[[str], None] = lambda note: None) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self._show_note = show_note

    def add_note(self, note: str) -> None:
        """Add a note about a successful check, and display it."""
        self.notes.append(note)
        self._show_note(note)

    def add_warning(self, message: str) -> None:
        """Add a warning, unless the report already contains the same warning."""
        if message not in self.warnings:
            self.warnings.append(message)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Return a context manager that adds a `CreditError` in its block to the report; other errors end the check."""
        try:
            with super().collect():
                yield
        except CreditError as error:
            self.add(str(error))

    @contextmanager
    def collect_logged_warnings(self) -> Iterator[None]:
        """Return a context manager that adds warnings logged in its block to this report."""
        logger = logging.getLogger("credit")
        handler = _WarningHandler(self)
        logger.addHandler(handler)
        # Propagation is off, so that the handlers of the root logger do not print a warning a second time.
        propagate = logger.propagate
        logger.propagate = False
        try:
            yield
        finally:
            logger.propagate = propagate
            logger.removeHandler(handler)

    @property
    def exit_status(self) -> int:
        """Exit status of the command, 2 if there are errors and otherwise 0."""
        return 2 if self.messages else 0

    def format(self) -> str:
        """Return the errors and warnings as text; the last line states their numbers.

        Messages that differ only in the name of a file are grouped.
        """
        lines = []
        levels = (("ERROR", "red", self.messages), ("WARNING", "yellow", self.warnings))
        for level, color, messages in levels:
            prefix = f"{level}:"
            for group in group_messages(messages):
                # Wrap lines before adding colours, because the escape sequences of colours would make lines longer.
                text = wrap_text(f"{prefix} {group.describe()}", indent="  ")
                lines.append(colorize(prefix, color) + text.removeprefix(prefix))
        if not lines:
            return colorize("no problem found", "green")
        counts = f"{_format_count(self.messages, 'error')}, {_format_count(self.warnings, 'warning')}"
        return "\n".join([*lines, colorize(counts, "bold")])

    def to_json_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document, with the keys that the help text of the command lists."""
        return {
            "errors": [group.to_json_dict() for group in group_messages(self.messages)],
            "warnings": [group.to_json_dict() for group in group_messages(self.warnings)],
            "notes": list(self.notes),
            "num_errors": len(self.messages),
            "num_warnings": len(self.warnings),
        }


@dataclass(frozen=True)
class MessageGroup:
    """A group of messages that are equal except for the name of a file.

    Attributes:
        message: the first message of the group; it contains the first name in `files`.
        files: the file names in the messages, in the order of the messages; empty for a single message.
    """

    message: str
    files: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the group as text: the number of files, the message without a file name, and the first file names."""
        if not self.files:
            return self.message
        first_file = self.files[0]
        if self.message.startswith(f"{first_file}: "):
            shared_text = self.message.removeprefix(f"{first_file}: ")
        else:
            shared_text = self.message.replace(first_file, "FILE")
        shown_files = ", ".join(self.files[:_MAX_FILES_SHOWN])
        num_hidden = len(self.files) - _MAX_FILES_SHOWN
        if num_hidden > 0:
            shown_files += f" and {num_hidden} more"
        return f"{len(self.files)} files: {shared_text}\n  {shown_files}"

    def to_json_dict(self) -> dict[str, Any]:
        """Return the group as an entry of the JSON document."""
        return {"message": self.message, "count": max(1, len(self.files)), "files": list(self.files)}


def group_messages(messages: Sequence[str]) -> list[MessageGroup]:
    """Group messages that differ only in the name of one file; the groups are in the order of their first messages."""
    # Text before and after the file name -> messages with this text, each with its file name.
    members: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for message in messages:
        file_names = set(_FILE.findall(message))
        if len(file_names) == 1:
            file_name = file_names.pop()
            key = tuple(message.split(file_name))
        else:
            # A message with two file names, or without a file name, is not grouped.
            file_name = ""
            key = (message,)
        members.setdefault(key, []).append((message, file_name))
    groups = []
    for group in members.values():
        first_message, _ = group[0]
        files: tuple[str, ...] = ()
        if len(group) > 1:
            files = tuple(file_name for _, file_name in group)
        groups.append(MessageGroup(first_message, files))
    return groups


class _WarningHandler(logging.Handler):
    """Log handler that adds warnings to a report and passes other records to the handlers of the root logger."""

    def __init__(self, report: CheckReport) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """Add a warning or an error to the report; pass other records to the handlers of the root logger."""
        if record.levelno >= logging.WARNING:
            self._report.add_warning(record.getMessage())
        else:
            logging.getLogger().handle(record)


def _format_count(messages: Sequence[str], noun: str) -> str:
    """Return the number of messages followed by the noun, such as "1 error" or "2 errors"."""
    if len(messages) == 1:
        return f"1 {noun}"
    return f"{len(messages)} {noun}s"
