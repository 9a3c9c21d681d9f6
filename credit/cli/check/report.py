"""The result of ``credit check``: errors, warnings and notes, as text for people or as JSON for programs."""

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

# Path of a file with one of the extensions of data files.
_FILE = re.compile(r"[^\s'\",;:()\[\]]+\.(?:nc4?|cdf|grib2?|grb2?|zarr|h5|hdf5)(?![\w.])")
_MAX_FILES_SHOWN = 3


class CheckReport(ErrorCollector):
    """Errors, warnings and notes of a check.

    A `CreditError` that is raised inside the context `collect` is added to the report and does not end the check.

    Args:
        show_note: function that is called with each note as soon as it is known, to show it; the default does nothing.

    Attributes:
        messages: errors, each once.
        warnings: problems that do not stop a run, each once.
        notes: sentences on what was checked and is in order.
    """

    def __init__(self, show_note: Callable[[str], None] = lambda note: None) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self._show_note = show_note

    def add_note(self, note: str) -> None:
        """Add a note on something that is in order, and show it."""
        self.notes.append(note)
        self._show_note(note)

    def add_warning(self, message: str) -> None:
        """Add a warning, unless the report has it already."""
        if message not in self.warnings:
            self.warnings.append(message)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context that adds a `CreditError` of the block to the report and continues after it; other errors pass."""
        try:
            with super().collect():
                yield
        except CreditError as error:
            self.add(str(error))

    @contextmanager
    def collect_log(self) -> Iterator[None]:
        """Context that turns warnings which the package logs inside the block into warnings of this report."""
        logger = logging.getLogger("credit")
        handler = _WarningHandler(self)
        logger.addHandler(handler)
        # Without propagation a warning is not printed a second time by the handlers of the root logger.
        propagate = logger.propagate
        logger.propagate = False
        try:
            yield
        finally:
            logger.propagate = propagate
            logger.removeHandler(handler)

    @property
    def exit_status(self) -> int:
        """Exit status of the command: 2 if there are errors, else 0."""
        return 2 if self.messages else 0

    def format(self) -> str:
        """Return errors and warnings as text, with their number at the end.

        Messages that differ only in the name of a file are grouped.
        """
        lines = []
        levels = (("ERROR", "red", self.messages), ("WARNING", "yellow", self.warnings))
        for level, color, messages in levels:
            prefix = f"{level}:"
            for group in group_messages(messages):
                # Wrap before colouring, because escape sequences of colours would count as characters of a line.
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
    """Messages that are equal except for the name of a file.

    Attributes:
        message: the first of the messages, which contains the first of `files`.
        files: the names of the files in the messages, in their order; empty for a single message.
    """

    message: str
    files: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the group as text: the number of files, the message without a file, and the first file names."""
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
    """Return the groups of messages that differ only in the name of one file, in the order of their first messages."""
    # Parts of a message around the file name -> messages with these parts, each with its file name.
    members: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for message in messages:
        file_names = set(_FILE.findall(message))
        if len(file_names) == 1:
            file_name = file_names.pop()
            key = tuple(message.split(file_name))
        else:
            # A message about two files concerns this pair only, so it is not grouped; neither is one without a file.
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
        """Add a warning or an error to the report; pass a record of a lower level to the root logger's handlers."""
        if record.levelno >= logging.WARNING:
            self._report.add_warning(record.getMessage())
        else:
            logging.getLogger().handle(record)


def _format_count(messages: Sequence[str], noun: str) -> str:
    """Return the number of messages with its noun, as in "1 error" and "2 errors"."""
    if len(messages) == 1:
        return f"1 {noun}"
    return f"{len(messages)} {noun}s"
