"""Plugin (``plugins: [tests.parallel.commands.forbid_large_gathers]``) that refuses what a thousand ranks cannot do.

The combined results of all ranks are sent to every rank, so they may not contain fields. Only rank 0 may open source
files and the description of the store, and list the checkpoints.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch.distributed as dist

from credit.data.sources import source_reader
from credit.data.store import store_reader
from credit.parallel.groups.object_tree import RankTree
from credit.train.checkpoint import checkpoint

T = TypeVar("T")

# A field of the tests has 512 numbers.
MAX_BYTES = 8 * 500

_original_reduce = RankTree.reduce


def _reduce_small_values(self: RankTree, value: T, combine: Callable[[T, T], T]) -> T:
    assert len(pickle.dumps(value)) <= MAX_BYTES, f"{value} is gathered"
    return _original_reduce(self, value, combine)


RankTree.reduce = _reduce_small_values


def _allow_on_rank0_only(module: ModuleType, name: str) -> None:
    function = getattr(module, name)

    def checked_function(*args: Any, **kwargs: Any) -> Any:
        assert not dist.is_initialized() or dist.get_rank() == 0, f"{name} on rank {dist.get_rank()}"
        return function(*args, **kwargs)

    setattr(module, name, checked_function)


_allow_on_rank0_only(source_reader, "scan_sources")
_allow_on_rank0_only(store_reader, "read_description")
_allow_on_rank0_only(checkpoint, "list_checkpoints")
