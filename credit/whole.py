"""A file that is replaced whole: readers see the old one or the new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from credit.errors import CreditError


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a file beside `path`, then put that in its place.

    For one writer of a path at a time. Nothing is flushed to the disk: after a power cut the old file may be there.

    Raises:
        CreditError: if it cannot be written; the old file stays.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        write(beside)
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # the netCDF library raises either
        beside.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise CreditError(f"{path}: cannot be written ({reason}); is the disk full?") from error
    return path


def write_text_whole(path: Path, text: str) -> Path:
    """Write a text file as `write_whole` does."""
    return write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
