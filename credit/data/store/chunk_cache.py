"""Node-local cache of the chunk files of a training store, for a store on a shared parallel file system."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

# Fraction of the disk that is left free for other users.
_MIN_FREE_FRACTION = 0.1


class ChunkCache:
    """Cache of files that are copied after their first read. Several processes may share its folder.

    The cache only saves time. A lost or damaged copy is made again. If there is no space, or the disk fails, the
    original files are read.

    Args:
        folder: folder for the copies of one store, which no other store may use.

    Attributes:
        folder: folder for the copies.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._accepts_copies = True

    def read_cached(self, name: str, origin: str, read_file: Callable[[str], None]) -> None:
        """Call `read_file` with the path of the copy of a file, or of the original if there is no valid copy.

        After the original was read, it is copied, unless the disk has no space for more copies.

        Args:
            name: file name of the copy in `folder`.
            origin: path of the original.
            read_file: function that reads the file at a path. It must raise `FileNotFoundError` if the file does not
                exist, and `OSError`, `ValueError` or `RuntimeError` if it is damaged.

        Raises:
            OSError: raised by `read_file`, if the original is lost.
            ValueError, RuntimeError: raised by `read_file`, if the original is damaged.
        """
        copy = self.folder / name
        # The copy is read without checking first that it exists, because the check would cost a second access.
        try:
            read_file(str(copy))
            return
        except FileNotFoundError:
            # This file is read for the first time on this node.
            pass
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("%s: the copy is damaged (%s) and made again", copy, error)
        read_file(origin)
        if self._accepts_copies:
            self._copy_file(copy, origin)

    def _copy_file(self, copy: Path, origin: str) -> None:
        """Copy a file into the cache; after the first failure no more files are copied."""
        # The name differs between threads and processes, which may copy the same file at once.
        temporary = copy.with_name(f".{copy.name}.{os.getpid()}.{threading.get_ident()}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            disk = shutil.disk_usage(self.folder)
            if disk.free - os.stat(origin).st_size < _MIN_FREE_FRACTION * disk.total:
                raise OSError(f"{disk.free / 1e9:.1f} GB are left")
            shutil.copyfile(origin, temporary)
            # Other processes see the whole copy or none.
            temporary.replace(copy)
        except OSError as error:
            self._accepts_copies = False
            temporary.unlink(missing_ok=True)
            logger.warning("data.cache_folder: %s takes no more copies (%s); the original files are read", copy, error)
