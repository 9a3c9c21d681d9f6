"""Counter of the collectives in a section of code, and of the bytes of their results."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from credit.hpc.planner.collectives import read_collective


class CollectiveCounter(TorchDispatchMode):
    """Context manager that counts collectives.

    On a CPU, the backward pass runs in the thread of the caller, so its collectives are counted as well.

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
        collective = read_collective(func, args, result)
        if collective is not None:
            kind, size = collective
            self.calls[kind] += 1
            self.bytes[kind] += size
        return result
