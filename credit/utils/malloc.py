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
    """Keep freed memory in this process, so that the CPU tensors of the next step can reuse the memory.

    By default, glibc returns freed memory to the system, which clears each page before it is used again. The clearing
    takes a few per cent of a training step, and a third of a step with large arrays. A process that keeps its freed
    memory needs up to a third more memory (benchmarks/lab_notes.md). With C libraries other than glibc, the function
    does nothing.

    Args:
        device: the device of the tensors. For a GPU, the function does nothing, because torch keeps GPU memory itself.
    """
    if device.type != "cpu":
        return
    # A C library other than glibc may not have mallopt; the settings are then not changed.
    with suppress(OSError, AttributeError, TypeError):
        # CDLL(None) gives access to all libraries that this process has loaded, including the C library.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_M_MMAP_MAX, _NONE)
