"""Names of what a process makes beside its place, and what killed processes have left of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# another host's, of which nobody has written for so long, was left by a killed process
_LEFT_SECONDS = 3600.0


def name_beside(path: Path) -> Path:
    """Return ``NAME.part.HOST.PID``, which no other process takes: those of several hosts may have one number."""
    return path.with_name(f"{path.name}.part.{socket.gethostname()}.{os.getpid()}")


def left_beside(folder: Path, pattern: str, is_alive: Callable[[int], bool]) -> list[Path]:
    """Return what killed processes have left.

    Args:
        folder: where to look.
        pattern: of the names without their ending.
        is_alive: whether a process of this host, by its number, may still be writing.
    """
    found = []
    for path in folder.glob(f"{pattern}.part*"):
        host, _, number = path.name.partition(".part")[2].removeprefix(".").rpartition(".")
        with suppress(OSError):  # gone meanwhile
            dead = host == socket.gethostname() and not (number.isdigit() and is_alive(int(number)))
            if dead or time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                found.append(path)
    return found


def is_running(process: int) -> bool:
    """Return whether this host has a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return True
