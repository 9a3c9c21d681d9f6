"""What a network does in another way on a CPU than on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

_as_gpu = False
# mallopt's options in <malloc.h>: free memory to give back, mappings for large arrays, which are given back when freed
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER, _NONE = -1, 0


def retain_freed_memory(device: torch.device) -> None:
    """Let a process that trains or forecasts on a CPU keep the memory that tensors free, for those of the next step.

    glibc gives it back to the system, which clears each page when it is touched again: some per cent of a step, and a
    third where arrays are large, for up to a quarter less memory (benchmarks/lab_notes.md). torch keeps a GPU's by
    itself. Without glibc nothing happens.
    """
    if device.type == "cpu":
        with suppress(OSError, AttributeError, TypeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
            libc.mallopt(_M_MMAP_MAX, _NONE)


def use_cpu_kernels(x: Tensor) -> bool:
    """Whether what works on `x` should take the way that suits a CPU."""
    return x.device.type == "cpu" and not _as_gpu


@contextmanager
def force_gpu_path() -> Iterator[None]:
    """Let networks on a CPU take the way that they take on a GPU, to predict what they need there."""
    global _as_gpu
    before, _as_gpu = _as_gpu, True
    try:
        yield
    finally:
        _as_gpu = before
