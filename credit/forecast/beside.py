"""Names of what a process makes beside its place, and what killed processes have left of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def name_beside(path: Path) -> Path:
    """Return ``NAME.part.HOST.PID``, which no other process takes: those of several hosts may have one number."""
    return path.with_name(f"{path.name}.part.{socket.gethostname()}.{os.getpid()}")


def left_beside(folder: Path, pattern: str, is_alive: Callable[[int], bool], seconds: float) -> list[Path]:
    """Return what killed processes have left.

    Args:
        folder: where to look.
        pattern: of the names without their ending.
        is_alive: whether a process of this host, by its number, may still be writing.
        seconds: after which what nobody has written to was left, also by processes of other hosts.
    """
    found = []
    for path in folder.glob(f"{pattern}.part*"):
        host, _, number = path.name.partition(".part")[2].removeprefix(".").rpartition(".")
        with suppress(OSError):  # gone meanwhile
            dead = host == socket.gethostname() and not (number.isdigit() and is_alive(int(number)))
            if dead or time.time() - path.stat().st_mtime > seconds:
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
