"""Names of what a process makes beside its place, and what killed processes have left of it."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# what follows NAME: before hosts and processes were in it there was nothing more
_ENDING = re.compile(r"\.part(\.(?P<host>[\w.-]+)\.(?P<process>\d+))?")


def temporary_path(path: Path) -> Path:
    """Return ``NAME.part.HOST.PID``, which no other process takes: those of several hosts may have one number."""
    return path.with_name(f"{path.name}.part.{socket.gethostname()}.{os.getpid()}")


def find_stale(folder: Path, pattern: str, is_alive: Callable[[int], bool], seconds: float) -> list[Path]:
    """Return what killed processes have left, ``NAME.part.HOST.PID`` or ``NAME.part``.

    Args:
        folder: where to look.
        pattern: of the names without their ending.
        is_alive: whether a process of this host, by its number, may still be writing.
        seconds: after which what nobody has written to was left, where the process is none of this host.
    """
    found = []
    for path in folder.glob(f"{pattern}.part*"):
        ending = _ENDING.fullmatch(path.name, path.name.index(".part"))
        if ending is None:  # somebody else's
            continue
        with suppress(OSError):  # gone meanwhile
            if ending["host"] == socket.gethostname():
                left = not is_alive(int(ending["process"]))
            else:
                left = time.time() - path.stat().st_mtime > seconds
            if left:
                found.append(path)
    return found


def process_exists(process: int) -> bool:
    """Return whether this host has a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return True
