"""Pool of host memory for batches, which reuses the memory of batches that are no longer needed."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict

import numpy as np
import torch
from torch.utils.data import get_worker_info


class BufferPool:
    """Pool of uninitialised float32 tensors.

    The operating system maps new memory page by page. This takes longer than reading a batch into memory that is
    already mapped. Therefore the pool keeps the memory of its tensors, and reuses it when no tensor, view or array
    refers to it. torch itself has a pool for pinned memory.
    """

    def __init__(self) -> None:
        self._free_arrays: dict[int, list[np.ndarray]] = defaultdict(list)

    def __reduce__(self) -> tuple[type[BufferPool], tuple]:
        # A process that unpickles the pool starts with an empty pool.
        return BufferPool, ()

    def take(self, *shape: int) -> torch.Tensor:
        """Return an uninitialised float32 tensor of the given shape.

        In a worker process of the loader, the memory is shared with the training process. In a process in which torch
        uses a GPU, the memory is pinned.
        """
        size = math.prod(shape)
        if get_worker_info() is not None:
            # torch's collate function allocates memory in this way. `share_memory_()` would copy uninitialised values.
            return torch.empty(0).set_(torch.UntypedStorage._new_shared(4 * size), 0, shape)
        if torch.cuda.is_initialized():
            # The process uses a GPU, which can copy from pinned memory in the background.
            return torch.empty(shape, pin_memory=True)
        free_arrays = self._free_arrays[size]
        try:
            memory = free_arrays.pop()
        except IndexError:
            # Use `except` instead of a check in advance, because a different thread may take the last array in between.
            memory = torch.empty(size).numpy()
        array = memory.reshape(shape)
        # The storage of the tensor refers to `array`, and every view of the tensor refers to the storage. When the last
        # reference is deleted, `array` is deleted, and `memory` returns to the pool.
        weakref.finalize(array, free_arrays.append, memory).atexit = False
        return torch.from_numpy(array)
