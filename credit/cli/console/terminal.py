"""Output of the commands on a terminal: coloured and wrapped text, aligned tables, ``--quiet`` and ``--json``.

A file or a pipe gets plain text, one message a line, so that ``grep`` and scripts can read it.
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

# Numbers in the escape sequences of some basic colours, which every terminal theme defines, and of bold and dim text.
_STYLES = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "bold": "1", "dim": "2"}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}
# Narrower text is harder to read than text that the terminal breaks.
_MIN_WIDTH = 40


def add_quiet_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--quiet``; `credit.cli.main` acts on it before the command runs."""
    parser.add_argument(
        "--quiet", action="store_true", help="print only results, warnings and errors: no progress bars and no notices"
    )


def print_json(document: object) -> None:
    """Print a document as JSON on standard output.

    Raises:
        ValueError: if the document contains NaN or infinity, which JSON does not have. The caller must replace them by
            None.
    """
    print(json.dumps(document, indent=2, allow_nan=False))


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if the stream is a terminal; False for streams of notebooks and for None, the stream of a daemon."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        # The stream is closed.
        return False


def supports_color(stream: TextIO | None) -> bool:
    """Return True if text for this stream may have colours.

    Environment variables are considered first, in the order that Python itself uses. ``NO_COLOR``
    (https://no-color.org) forbids colours. ``FORCE_COLOR`` (https://force-color.org) demands them, even in a pipe.
    ``TERM=dumb`` stands for a terminal without colours. Otherwise a terminal gets colours, and a file or pipe does not.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    if os.environ.get("TERM") == "dumb":
        return False
    return is_terminal(stream)


def colorize(text: str, name: str, stream: TextIO | None = None) -> str:
    """Return text with the escape sequences of a colour; unchanged if the stream does not support colours.

    Args:
        text: text to show.
        name: red, green, yellow, cyan, bold or dim.
        stream: stream that the text goes to; None for standard output.

    Raises:
        KeyError: if there is no style of this name.
    """
    if stream is None:
        stream = sys.stdout
    if not supports_color(stream):
        return text
    return f"\x1b[{_STYLES[name]}m{text}\x1b[0m"


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the width of the stream's terminal in characters, at least 40; None for a file or a pipe.

    Args:
        stream: stream of the text; None for standard output. The variable ``COLUMNS`` overrides the terminal's width.
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
    """Return text broken between words at the width of the stream's terminal; unchanged for a file or a pipe.

    Args:
        text: one or more lines, which stay separate; each keeps its own indentation.
        stream: stream that the text goes to; None for standard output.
        indent: text put at the beginning of each further line into which a line is broken.
    """
    width = terminal_width(stream)
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        lines.append(_wrap_line(line, width, indent))
    return "\n".join(lines)


def _wrap_line(line: str, width: int, indent: str) -> str:
    """Return one line broken between words into lines of at most `width` characters; a longer word keeps its length.

    Args:
        line: text without line breaks.
        width: number of characters.
        indent: text put before each further line, after the indentation of `line`.
    """
    if visible_length(line) <= width:
        return line
    line_indent = line[: len(line) - len(line.lstrip())]
    # Paths and keys stay whole, even where they are longer than a line: people copy them.
    wrapper = textwrap.TextWrapper(
        width=width,
        subsequent_indent=indent + line_indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
    return wrapper.fill(line)


def visible_length(text: str) -> int:
    """Return the number of characters of a text that a terminal shows; escape sequences of colours do not count."""
    return len(_ESCAPE.sub("", text))


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], right_aligned: Sequence[str] = ()) -> str:
    """Return rows of text as an aligned table under a header.

    Args:
        header: names of the columns.
        rows: rows of cells, with one cell for each column; cells may be coloured.
        right_aligned: names of the columns of numbers.
    """
    # A column is as wide as its widest cell.
    widths = []
    for column, name in enumerate(header):
        lengths = [visible_length(row[column]) for row in rows]
        widths.append(max([len(name), *lengths]))
    lines = []
    for row in [header, *rows]:
        cells = []
        for name, cell, width in zip(header, row, widths, strict=True):
            # `str.ljust` would count the escape sequences of colours as characters.
            padding = " " * (width - visible_length(cell))
            if name in right_aligned:
                cells.append(padding + cell)
            else:
                cells.append(cell + padding)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class LogFormatter(logging.Formatter):
    """Formatter of log records as ``LEVEL: message``: coloured and wrapped on a terminal, plain elsewhere.

    Args:
        stream: stream that the records go to.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__("%(levelname)s: %(message)s")
        self._stream = stream

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        text = super().format(record)
        # Tracebacks keep their lines.
        if record.exc_info is None:
            text = wrap_text(text, self._stream, indent="  ")
        name = _LEVEL_STYLES.get(record.levelno)
        if name is None:
            return text
        level = record.levelname
        return colorize(level, name, self._stream) + text.removeprefix(level)
