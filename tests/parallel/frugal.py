"""A plugin (``plugins: [tests.parallel.frugal]``): refuses what a thousand ranks cannot afford.

What `all_gather_object` gathers, each rank receives from every rank, in the size of the largest: no fields. Every
source file and the store's description are opened by rank 0 alone to see what is in them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from credit.data import sources, store

MOST_NUMBERS = 500  # a field of the small world has 512

_gather, _scan, _describe = dist.all_gather_object, sources.scan_sources, store.read_description


class _Looks(pickle.Pickler):
    def reducer_override(self, found: Any) -> Any:
        assert not isinstance(found, np.ndarray) or found.size <= MOST_NUMBERS, f"{found.shape} is gathered"
        return NotImplemented


def _gather_objects(gathered: list, mine: Any, group: dist.ProcessGroup | None = None) -> None:
    _Looks(io.BytesIO()).dump(mine)
    _gather(gathered, mine, group=group)


dist.all_gather_object = _gather_objects


def _of_main(function: Callable, what: str) -> Callable:
    def called(*arguments: Any) -> Any:
        assert not dist.is_initialized() or dist.get_rank() == 0, f"looks at {what}"
        return function(*arguments)

    return called


sources.scan_sources = _of_main(_scan, "all source files")
store.read_description = _of_main(_describe, "the store")
