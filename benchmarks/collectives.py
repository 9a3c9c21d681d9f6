"""Counts the collectives of a piece of code and the bytes that they bring."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch names them differently from release to release
_KINDS = {"allgather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
          "allreduce": "all-reduce", "all_reduce": "all-reduce", "broadcast": "broadcast"}  # fmt: skip


class CollectiveCounter(TorchDispatchMode):
    """Counts while it is entered; on the CPU the backward pass runs in the caller's thread and is seen, too.

    Attributes:
        calls: kind -> number of calls.
        bytes: kind -> bytes of the results on this rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1].strip("_")
            for start, kind in _KINDS.items():
                if name.startswith(start):
                    tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
                    self.calls[kind] += 1
                    self.bytes[kind] += sum(t.numel() * t.element_size() for t in tensors)
                    break
        return result
