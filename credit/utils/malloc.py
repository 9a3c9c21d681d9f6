"""Settings of the C library's memory allocator."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Options of mallopt in <malloc.h>: the free memory from which on it is given back to the system, and the number of
# arrays that are mapped one by one, which are given back as soon as they are freed.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = -1
_NONE = 0


def retain_freed_memory(device: torch.device) -> None:
    """Let a process that trains or forecasts on a CPU keep the memory that tensors free, for those of the next step.

    glibc gives it back to the system, which clears each page when it is touched again: some per cent of a step, and a
    third where arrays are large, for up to a quarter less memory (benchmarks/lab_notes.md). torch itself keeps the
    memory of a GPU. Without glibc nothing happens.

    Args:
        device: the device of the tensors; nothing is done unless it is a CPU.
    """
    if device.type != "cpu":
        return
    with suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_M_MMAP_MAX, _NONE)
