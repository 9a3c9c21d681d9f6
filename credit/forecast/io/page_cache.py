"""What is done so that fields on their way to the disk do not wait in memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def start_writeback(path: Path) -> None:
    """Have the system store, while the model computes, what a file has; what it has stored leaves the page cache.

    Else all of it waits for who asks last, and each new field wants new memory, which the system has to clear.
    """
    if hasattr(os, "posix_fadvise"):  # Linux
        with suppress(OSError), open(path, "rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
