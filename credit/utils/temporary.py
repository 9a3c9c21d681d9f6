"""Names of temporary files, and search for temporary files of killed processes."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Ending of the name of a temporary file. Earlier versions of the package did not include host and process.
_ENDING = re.compile(r"\.part(\.(?P<host>[\w.-]+)\.(?P<process>\d+))?")


def temporary_path(path: Path) -> Path:
    """Return the path ``NAME.part.HOST.PID`` in the folder of `path`; no other process uses this name.

    The name contains the host, because processes on two hosts may have the same process ID.
    """
    return path.with_name(f"{path.name}.part.{socket.gethostname()}.{os.getpid()}")


def find_stale_files(folder: Path, pattern: str, is_alive: Callable[[int], bool], seconds: float) -> list[Path]:
    """Return the temporary files of killed processes, ``NAME.part.HOST.PID`` or ``NAME.part``.

    Args:
        folder: the folder to search.
        pattern: glob pattern of NAME.
        is_alive: function of a process ID on this host; it returns True if this process may still be writing.
        seconds: time since the last change, in seconds, after which the file of a process on a different host, or of an
            unknown process, is treated as stale.
    """
    stale_paths = []
    for path in folder.glob(f"{pattern}.part*"):
        ending = _ENDING.fullmatch(path.name, path.name.index(".part"))
        if ending is None:
            # Another program wrote this file.
            continue
        # Another process may remove the file in the meantime.
        with suppress(OSError):
            if ending["host"] == socket.gethostname():
                is_stale = not is_alive(int(ending["process"]))
            else:
                is_stale = time.time() - path.stat().st_mtime > seconds
            if is_stale:
                stale_paths.append(path)
    return stale_paths


def process_exists(process: int) -> bool:
    """Return True if this host has a process with this process ID."""
    try:
        # The system does not deliver signal 0; it only checks that the process exists.
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # The process belongs to another user.
        pass
    return True
