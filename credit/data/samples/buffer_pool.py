"""Pool of host memory for batches: the memory of a batch that is no longer used serves for a later batch."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict

import numpy as np
import torch
from torch.utils.data import get_worker_info


class BufferPool:
    """Pool of uninitialised float32 tensors.

    The operating system maps new memory page by page, which takes longer than reading a batch into memory that the
    process already has. So the pool keeps the memory of its tensors. It hands memory out again once no tensor, view or
    array uses it any more. Pinned memory is pooled by torch itself.
    """

    def __init__(self) -> None:
        self._free_arrays: dict[int, list[np.ndarray]] = defaultdict(list)

    def __reduce__(self) -> tuple[type[BufferPool], tuple]:
        # A process that receives the pool starts with an empty one.
        return BufferPool, ()

    def take(self, *shape: int) -> torch.Tensor:
        """Return an uninitialised float32 tensor of the given shape.

        In a worker process of the loader, its memory is shared with the training process. In a process in which torch
        uses a GPU, its memory is pinned.
        """
        size = math.prod(shape)
        if get_worker_info() is not None:
            # torch's collation allocates the same way. `share_memory_()` would copy the uninitialised values.
            return torch.empty(0).set_(torch.UntypedStorage._new_shared(4 * size), 0, shape)
        if torch.cuda.is_initialized():
            # This process trains on a GPU, which copies from pinned memory in the background.
            return torch.empty(shape, pin_memory=True)
        free_arrays = self._free_arrays[size]
        try:
            memory = free_arrays.pop()
        except IndexError:
            # Not `if free_arrays`: another thread may take the last array in between.
            memory = torch.empty(size).numpy()
        array = memory.reshape(shape)
        # The tensor's storage holds `array`, and every view of the tensor holds the storage. So `array` is collected,
        # and `memory` returned to the pool, when the last of them is gone.
        weakref.finalize(array, free_arrays.append, memory).atexit = False
        return torch.from_numpy(array)
