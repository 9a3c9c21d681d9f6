"""Atomic replacement of files and folders, so that readers never read partly written content."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from credit.errors import CreditError

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


def atomic_write(path: Path, write: Callable[[Path], object]) -> Path:
    """Write a file under a temporary name in the folder of `path`, then rename it to `path`.

    The caller must ensure that only one process writes `path` at a time, because the temporary name is always the same.
    The file is flushed to the disk before it is renamed. The folder is not flushed, so the old file may be restored
    after a power failure. The file gets the default permissions of new files in its folder, because some libraries
    create files that only the owner can read.

    Args:
        path: the file to write.
        write: function that writes the content to the temporary path, which is its argument.

    Returns:
        `path`.

    Raises:
        CreditError: if the file cannot be written; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        # The temporary file of a killed process may still exist.
        temporary.unlink(missing_ok=True)
        mode = _mode_of_new_file(temporary)
        write(temporary)
        # A link has no mode and no content; its target is not changed.
        if not temporary.is_symlink():
            temporary.chmod(mode)
            flush_to_disk(temporary)
        os.replace(temporary, path)
    # The netCDF library raises an OSError or a RuntimeError.
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # Only an OSError has `strerror`, and it may be None.
        reason = getattr(error, "strerror", None) or error
        advice = ""
        if getattr(error, "errno", None) in _DISK_FULL_ERRORS:
            advice = "; is the disk full?"
        raise CreditError(f"{path}: cannot be written ({reason}){advice}") from error
    return path


def atomic_write_text(path: Path, text: str) -> Path:
    """Write a UTF-8 text file atomically, see `atomic_write`, and return `path`.

    Raises:
        CreditError: if the file cannot be written; the old file stays.
    """
    return atomic_write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def atomic_folder(path: Path, scratch_folder: Path | None = None) -> Iterator[Path]:
    """Context manager that yields a temporary path, and renames the folder created there to `path`.

    If the ``with`` block raises an error, the new folder is removed and `path` is not changed. Otherwise an old folder
    at `path` is moved away before the rename and removed after the rename. Readers of `path` find the old folder, for a
    moment no folder, or the new folder, but never a folder that is partly filled or partly removed.

    Args:
        path: the folder to create or replace.
        scratch_folder: folder of the temporary paths, on the same file system as `path`; None for the parent of `path`.

    Yields:
        The temporary path. It does not exist yet, and the ``with`` block must create a folder there.

    Raises:
        OSError: if the block created no folder, or the new folder cannot be renamed.
    """
    if scratch_folder is None:
        scratch_folder = path.parent
    new_folder = scratch_folder / f".{path.name}.{os.getpid()}.partial"
    old_folder = scratch_folder / f".{path.name}.{os.getpid()}.old"
    try:
        yield new_folder
        # A folder cannot replace a folder that is not empty, so the old folder is moved away first.
        if path.exists():
            os.replace(path, old_folder)
        os.replace(new_folder, path)
    finally:
        shutil.rmtree(new_folder, ignore_errors=True)
        shutil.rmtree(old_folder, ignore_errors=True)


def _mode_of_new_file(path: Path) -> int:
    """Return the permission bits that the system gives a new file at `path`, where no file exists."""
    # The umask can only be read by changing it, and a folder may define different permissions. So a file is created,
    # and its mode is read.
    path.touch(exist_ok=False)
    mode = path.stat().st_mode & 0o777
    path.unlink()
    return mode


def flush_to_disk(path: Path) -> None:
    """Wait until the contents of a file, or the list of entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
