"""Node-local cache of the chunk files of a training store, for a store on a shared parallel file system.

The processes of a node share the cache, so each file of the store is read only once per node. The first process that
needs a file copies it to a local disk, or to a folder in memory such as /dev/shm. The other processes wait for the
copy and read it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

# Fraction of the disk that is left free for other users.
_MIN_FREE_FRACTION = 0.1
# Number of lock files of a cache. Files with the same lock file are copied one after the other.
_NUM_LOCKS = 64


class ChunkCache:
    """Cache of files that are copied when they are first needed; several processes may share the folder.

    If a copy is lost or damaged, the file is copied again. If there is no space, or the disk fails, the original files
    are read.

    Args:
        folder: folder for the copies of one store; each store needs a separate folder.

    Attributes:
        folder: folder for the copies.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._accepts_copies = True

    def read_cached(self, name: str, origin: str, read_file: Callable[[str], None]) -> None:
        """Call `read_file` with the path of the copy of a file; without a valid copy, use the path of the original.

        A file without a copy is copied first, unless the disk has no space for more copies.

        Args:
            name: file name of the copy in `folder`.
            origin: path of the original file.
            read_file: function that reads the file at a path. It must raise `FileNotFoundError` if the file does not
                exist, and `OSError`, `ValueError` or `RuntimeError` if it is damaged.

        Raises:
            OSError: raised by `read_file`, if the original is lost.
            ValueError, RuntimeError: raised by `read_file`, if the original is damaged.
        """
        copy = self.folder / name
        # The copy is read without checking first that it exists, because the check would cost a second access.
        if self._read_copy(copy, read_file):
            return
        if self._accepts_copies:
            try:
                with self._locked(name):
                    # Another process may have made the copy while this process waited for the lock.
                    if self._read_copy(copy, read_file):
                        return
                    self._copy_file(copy, origin)
            except OSError as error:
                # A lost original is not an error of the cache.
                if os.path.exists(origin):
                    self._accepts_copies = False
                    logger.warning(
                        "data.cache_folder: %s cannot be written (%s); the original files are read", copy, error
                    )
            else:
                if self._read_copy(copy, read_file):
                    return
        # If the original is damaged, this call raises the error.
        read_file(origin)

    def _read_copy(self, copy: Path, read_file: Callable[[str], None]) -> bool:
        """Read a copy; return True if it exists and is intact, and remove it if it is damaged."""
        try:
            read_file(str(copy))
        except FileNotFoundError:
            return False
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("%s: the copy is damaged (%s) and removed", copy, error)
            copy.unlink(missing_ok=True)
            return False
        return True

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Return a context in which no other process or thread of the node copies the file `name`.

        Raises:
            OSError: if the folder cannot be written to, or its file system has no locks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        # All copies share a few lock files. The operating system releases the lock of a process that is killed.
        lock = self.folder / f".lock_{zlib.crc32(name.encode()) % _NUM_LOCKS:02d}"
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _copy_file(self, copy: Path, origin: str) -> None:
        """Copy a file into the cache.

        Raises:
            OSError: if there is no space, or the file cannot be copied.
        """
        disk = shutil.disk_usage(self.folder)
        if disk.free - os.stat(origin).st_size < _MIN_FREE_FRACTION * disk.total:
            raise OSError(f"only {disk.free / 1e9:.1f} GB are free")
        # Each thread of each process uses a different name, because a killed process may have left a partial file.
        temporary = copy.with_name(f".{copy.name}.{os.getpid()}.{threading.get_ident()}.partial")
        try:
            shutil.copyfile(origin, temporary)
            # After this atomic rename, other processes can read the complete copy.
            temporary.replace(copy)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
