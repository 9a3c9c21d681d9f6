"""Writeback of files to the disk while they are still being written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def start_writeback(path: Path) -> None:
    """Request that the system writes a file's data to the disk now, and drops the written data from the page cache.

    Without this request, all data of a forecast stay in the page cache until the file is flushed at the end. Each new
    field then needs new memory, which the system has to clear first. On systems other than Linux, and if the file
    cannot be opened, the function does nothing.

    Args:
        path: the file that is being written.
    """
    # Not every system has this call. With DONTNEED, Linux starts to write the data; unwritten pages stay in the cache.
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), open(path, "rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
