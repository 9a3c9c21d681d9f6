"""Memory of batches, used again when a batch is gone."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict

import numpy as np
import torch
from torch.utils.data import get_worker_info


class BufferPool:
    """Gives float32 tensors to be filled.

    Memory that is new to a process comes page by page, which takes longer than reading a batch into memory that it has.
    So memory that was given is kept, and given again once no tensor, view or array shares it any more. Pinned memory is
    kept by torch.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)

    def __reduce__(self) -> tuple[type[BufferPool], tuple]:
        return BufferPool, ()

    def take(self, *shape: int) -> torch.Tensor:
        """Return a tensor; in a loader process in memory that it has in common with the training process."""
        size = math.prod(shape)
        if get_worker_info() is not None:
            # as torch's own collation does it; share_memory_() would copy what is not there yet
            return torch.empty(0).set_(torch.UntypedStorage._new_shared(4 * size), 0, shape)
        if torch.cuda.is_initialized():  # by this process, which then trains on a GPU
            return torch.empty(shape, pin_memory=True)
        free = self._free[size]
        memory = _pop(free, size)
        # the tensor's storage holds this array, and so does every view of it
        array = memory.reshape(shape)
        weakref.finalize(array, free.append, memory).atexit = False
        return torch.from_numpy(array)


def _pop(free: list[np.ndarray], size: int) -> np.ndarray:
    try:
        return free.pop()
    except IndexError:  # perhaps another thread was faster
        return torch.empty(size).numpy()
