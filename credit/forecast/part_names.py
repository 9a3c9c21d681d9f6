"""Names of what is in the making beside its place, and what killed processes have left of it."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

# what another host's killed process left is known by its age: who still writes has written since
_LEFT_SECONDS = 3600.0


def own_part(path: Path) -> Path:
    """Return where this process makes `path`; jobs of an array on several hosts may have one process number."""
    return path.with_name(f"{path.name}.part.{socket.gethostname()}.{os.getpid()}")


def left_parts(path: Path) -> list[Path]:
    """Return what processes that are gone, or for an hour have not written, have left of `path`."""
    found, head = [], f"{path.name}.part"
    for part in path.parent.glob(f"{head}*"):
        host, _, pid = part.name.removeprefix(head).removeprefix(".").rpartition(".")
        with suppress(OSError):  # gone meanwhile
            of_here = host == socket.gethostname() and pid.isdigit()
            if (of_here and _is_gone(int(pid))) or time.time() - part.stat().st_mtime > _LEFT_SECONDS:
                found.append(part)
    return found


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
