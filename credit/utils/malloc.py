"""Settings of the C library's memory allocator."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Options of mallopt in <malloc.h>. M_TRIM_THRESHOLD: free memory above which malloc returns memory to the system.
# M_MMAP_MAX: number of arrays with a separate memory mapping, which is returned as soon as the array is freed.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = -1
_NONE = 0


def retain_freed_memory(device: torch.device) -> None:
    """Keep freed memory in this process, so that the tensors of the next step on the CPU reuse it.

    By default glibc returns freed memory to the system, which clears each page before it is used again. This clearing
    takes a few per cent of a training step, and a third of a step with large arrays. A process that keeps its freed
    memory needs up to a third more memory (benchmarks/lab_notes.md). With another C library the function does nothing.

    Args:
        device: the device of the tensors. For a GPU nothing is done, because torch itself keeps the memory of a GPU.
    """
    if device.type != "cpu":
        return
    # A C library other than glibc may lack mallopt; the process then works as before, only slower.
    with suppress(OSError, AttributeError, TypeError):
        # None stands for the libraries that this process has loaded, the C library among them.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_M_MMAP_MAX, _NONE)
