"""A file that is replaced whole: readers see the old one or the new one, never a part."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from credit.errors import CreditError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def atomic_write(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a file beside `path`, then put that in its place.

    For one writer of a path at a time. The file is on the disk before it takes the name; the folder need not be: after
    a power cut the old file may be there. Its mode is that of any new file, also where a library writes files that the
    owner alone can read.

    Raises:
        CreditError: if it cannot be written; the old file stays.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.unlink(missing_ok=True)  # a killed process may have left it
        mode = _mode_of_new_file(beside)
        write(beside)
        if not beside.is_symlink():
            beside.chmod(mode)
        _flush(beside)
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # the netCDF library raises either
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        advice = "; is the disk full?" if getattr(error, "errno", None) in _FULL else ""
        raise CreditError(f"{path}: cannot be written ({reason}){advice}") from error
    return path


def _mode_of_new_file(path: Path) -> int:
    """Return the mode that the system gives a new file at `path`, by the umask or the folder's rules."""
    path.touch(exist_ok=False)
    mode = path.stat().st_mode & 0o777
    path.unlink()
    return mode


def atomic_write_text(path: Path, text: str) -> Path:
    """Write a text file as `atomic_write` does."""
    return atomic_write(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def _flush(path: Path) -> None:
    """Wait until the disk has the file; a link has nothing to wait for."""
    if path.is_symlink():
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
