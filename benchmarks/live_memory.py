"""Counter of the memory that a section of code allocates on any device, including the meta device."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Context manager that adds up the bytes of new storages from their allocation until they are freed.

    Args:
        existing_tensors: tensors that exist before and are not counted.

    Attributes:
        part: name under which new storages are counted; the caller sets it.
        now: part -> bytes of its storages that are not freed yet.
        peak: largest number of bytes at a time, all parts together.
        largest: bytes of the largest new storage.
    """

    def __init__(self, existing_tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.part = ""
        self.now: Counter[str] = Counter()
        self.peak = 0
        self.largest = 0
        # The address of a storage is its key: key -> part under which the storage is counted, and its bytes.
        self._sizes: dict[int, tuple[str, int]] = {}
        # Storages are kept alive here, because the key of a freed one could be given to a new storage.
        self._existing: dict[int, torch.UntypedStorage] = {}
        for tensor in existing_tensors:
            storage = tensor.untyped_storage()
            self._existing[storage._cdata] = storage

    def __enter__(self) -> LiveMemory:
        self._resize = torch.UntypedStorage.resize_

        # FSDP2 frees unsharded weights by resizing their storages to 0.
        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            self._count(storage)

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                # The storage of a DTensor itself is empty, but reports the size of the whole tensor.
                local_tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                self._count(local_tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage, or the new size of a storage that has already been counted."""
        key = storage._cdata
        if key in self._existing:
            return
        if key not in self._sizes:
            self._sizes[key] = (self.part, 0)
            finalizer = weakref.finalize(storage, self._drop, key)
            # At the end of the process there is nothing to subtract.
            finalizer.atexit = False
        part, size_before = self._sizes[key]
        self._sizes[key] = (part, storage.nbytes())
        self.now[part] += storage.nbytes() - size_before
        self.peak = max(self.peak, self.now.total())
        self.largest = max(self.largest, storage.nbytes())

    def _drop(self, key: int) -> None:
        """Subtract a storage that has been freed."""
        part, size = self._sizes.pop(key)
        self.now[part] -= size
