"""Lock files that exclude other processes, also on other hosts that share the file system."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Context manager that holds the lock on the file `path` during the ``with`` block.

    The system releases the lock when the process ends, even if the process is killed, so a lock is never stale.

    Args:
        path: the lock file; the file and its folder are created if they do not exist.
        wait: True to wait until no other process holds the lock; False to enter the block at once, with or without it.

    Yields:
        True if this process holds the lock; False if `wait` is False and another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    operation = fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    # Closing the file at the end of the block releases the lock.
    with path.open("w") as file:
        try:
            fcntl.lockf(file, operation)
        except (BlockingIOError, PermissionError):
            # If another process holds the lock, some systems raise BlockingIOError and others PermissionError.
            yield False
        else:
            yield True
