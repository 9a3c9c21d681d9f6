"""Names of temporary files, and search for temporary files that killed processes have left behind."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# The ending of a temporary file's name. Earlier versions of the package wrote neither host nor process into it.
_ENDING = re.compile(r"\.part(\.(?P<host>[\w.-]+)\.(?P<process>\d+))?")


def temporary_path(path: Path) -> Path:
    """Return the path ``NAME.part.HOST.PID`` beside `path`, a name that no other process uses.

    The name contains the host because processes on two hosts may have the same process ID.
    """
    return path.with_name(f"{path.name}.part.{socket.gethostname()}.{os.getpid()}")


def find_stale_files(folder: Path, pattern: str, is_alive: Callable[[int], bool], seconds: float) -> list[Path]:
    """Return the temporary files that killed processes have left behind, ``NAME.part.HOST.PID`` or ``NAME.part``.

    Args:
        folder: the folder to search.
        pattern: glob pattern of NAME.
        is_alive: function of the process ID on this host; it returns True if that process may still be writing.
        seconds: age of the last change above which a file of another host, or without a host, counts as left behind.
    """
    stale_paths = []
    for path in folder.glob(f"{pattern}.part*"):
        ending = _ENDING.fullmatch(path.name, path.name.index(".part"))
        if ending is None:
            # Another program wrote this file.
            continue
        # The file may disappear in the meantime.
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
        # Signal 0 is not delivered; the system only checks that the process exists.
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # The process belongs to another user.
        pass
    return True
