"""Copies of files on a nearer disk: the node's own, where a store lies on a parallel file system."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

# so much of the disk is left to others
_LEFT_FREE = 0.1


class ChunkCache:
    """Reads files through copies, which are made after a first read. Several processes may share the folder.

    Copies only ever save time: a lost or damaged one is made again, and without room, or where the disk fails, files
    are read where they are.

    Args:
        folder: for the copies of one store; nothing of another may ever be in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._adding = True

    def read(self, name: str, origin: str, read: Callable[[str], None]) -> None:
        """Call `read` with the path of a copy, or of the original where there is no good one.

        Args:
            name: of the copy.
            origin: path of the original.
            read: reads a file; raises where it is lost or damaged.
        """
        copy = self.folder / name
        try:
            return read(str(copy))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("%s: the copy is damaged (%s) and made again", copy, error)
        read(origin)
        if self._adding:
            self._add(copy, origin)
        return None

    def _add(self, copy: Path, origin: str) -> None:
        beside = copy.with_name(f".{copy.name}.{os.getpid()}.{threading.get_ident()}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            disk = shutil.disk_usage(self.folder)
            if disk.free - os.stat(origin).st_size < _LEFT_FREE * disk.total:
                raise OSError(f"{disk.free / 1e9:.1f} GB are left")
            shutil.copyfile(origin, beside)
            beside.replace(copy)
        except OSError as error:
            self._adding = False
            beside.unlink(missing_ok=True)
            logger.warning("data.cache_folder: %s takes no more copies (%s); the rest is read as it is", copy, error)
