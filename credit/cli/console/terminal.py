"""Output of the commands on a terminal: coloured and wrapped text, aligned tables, ``--quiet`` and ``--json``.

Output to a file or a pipe is plain text with one message per line, so that ``grep`` and scripts can read it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

# Codes of the escape sequences for basic colours, which every terminal theme defines, and for bold and dim text.
_STYLES = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "bold": "1", "dim": "2"}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}
# Smallest width to which text is wrapped. Narrower text would be harder to read than lines that the terminal breaks.
_MIN_WIDTH = 40


def add_quiet_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--quiet``; `credit.cli.main` reads this option before the command runs."""
    parser.add_argument(
        "--quiet", action="store_true", help="print only results, warnings and errors: no progress bars and no notices"
    )


def print_json(document: object) -> None:
    """Print a document as JSON on standard output.

    Raises:
        ValueError: if the document contains NaN or infinity, which JSON does not support. The caller must replace them
            with None.
    """
    print(json.dumps(document, indent=2, allow_nan=False))


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if the stream is a terminal; False for streams of notebooks and for None."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        # The stream is closed.
        return False


def supports_color(stream: TextIO | None) -> bool:
    """Return True if output to this stream may be coloured.

    Environment variables have priority and are evaluated in the same order as in Python. ``NO_COLOR``
    (https://no-color.org) disables colours. ``FORCE_COLOR`` (https://force-color.org) enables them, even in a pipe.
    ``TERM=dumb`` means a terminal without colours. Otherwise, only output to a terminal is coloured.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    if os.environ.get("TERM") == "dumb":
        return False
    return is_terminal(stream)


def colorize(text: str, name: str, stream: TextIO | None = None) -> str:
    """Add the escape sequences of a colour to a text; return the text unchanged if the stream does not support colours.

    Args:
        text: text to colour.
        name: red, green, yellow, cyan, bold or dim.
        stream: stream to which the text will be written; None for standard output.

    Raises:
        KeyError: if there is no style with this name.
    """
    if stream is None:
        stream = sys.stdout
    if not supports_color(stream):
        return text
    return f"\x1b[{_STYLES[name]}m{text}\x1b[0m"


def get_terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the width of the stream's terminal in characters, at least 40; None for a file or a pipe.

    Args:
        stream: output stream; None for standard output. The variable ``COLUMNS`` overrides the width of the terminal.
    """
    if stream is None:
        stream = sys.stdout
    if not is_terminal(stream):
        return None
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns):
        return max(int(columns), _MIN_WIDTH)
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        width = 0
    # Some pseudo-terminals report a width of 0.
    if width == 0:
        width = shutil.get_terminal_size().columns
    return max(width, _MIN_WIDTH)


def wrap_text(text: str, stream: TextIO | None = None, indent: str = "") -> str:
    """Wrap text between words at the width of the stream's terminal; return it unchanged for a file or a pipe.

    Args:
        text: one or more lines. Each line is wrapped separately and keeps its indentation.
        stream: stream to which the text will be written; None for standard output.
        indent: prefix of each continuation line.
    """
    width = get_terminal_width(stream)
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        lines.append(_wrap_line(line, width, indent))
    return "\n".join(lines)


def _wrap_line(line: str, width: int, indent: str) -> str:
    """Wrap one line between words into lines of at most `width` characters; a word longer than `width` is not broken.

    Args:
        line: text without line breaks.
        width: largest number of characters per line.
        indent: prefix of each continuation line, after the indentation of `line`.
    """
    if count_visible_characters(line) <= width:
        return line
    line_indent = line[: len(line) - len(line.lstrip())]
    # Paths and keys are not broken, even if they are longer than a line, so that they can be copied.
    wrapper = textwrap.TextWrapper(
        width=width,
        subsequent_indent=indent + line_indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
    return wrapper.fill(line)


def count_visible_characters(text: str) -> int:
    """Return the number of visible characters of a text, without the escape sequences of colours."""
    return len(_ESCAPE.sub("", text))


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], right_aligned: Sequence[str] = ()) -> str:
    """Format rows of cells as an aligned table with a header.

    Args:
        header: names of the columns.
        rows: rows with one cell for each column; cells may be coloured.
        right_aligned: names of the right-aligned columns, such as numbers.
    """
    # The width of a column is the width of its widest cell.
    widths = []
    for column, name in enumerate(header):
        lengths = [count_visible_characters(row[column]) for row in rows]
        widths.append(max([len(name), *lengths]))
    lines = []
    for row in [header, *rows]:
        cells = []
        for name, cell, width in zip(header, row, widths, strict=True):
            # `str.ljust` is not used, because it would include the escape sequences of colours in the width.
            padding = " " * (width - count_visible_characters(cell))
            if name in right_aligned:
                cells.append(padding + cell)
            else:
                cells.append(cell + padding)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class LogFormatter(logging.Formatter):
    """Formatter of log records as ``LEVEL: message``; on a terminal, the text is coloured and wrapped.

    Args:
        stream: stream to which the records are written.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__("%(levelname)s: %(message)s")
        self._stream = stream

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted text of a log record."""
        text = super().format(record)
        # Tracebacks are not wrapped.
        if record.exc_info is None:
            text = wrap_text(text, self._stream, indent="  ")
        name = _LEVEL_STYLES.get(record.levelno)
        if name is None:
            return text
        level = record.levelname
        return colorize(level, name, self._stream) + text.removeprefix(level)
