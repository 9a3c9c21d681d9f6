"""A plugin (``plugins: [tests.parallel.commands.forbid_large_gathers]``): refuses what a thousand ranks cannot afford.

What `all_gather_object` gathers, each rank receives from every rank, in the size of the largest: no fields. Every
source file and the store's description are opened by rank 0 alone, and it alone lists the checkpoints.
"""

from __future__ import annotations

import io
import pickle
from types import ModuleType
from typing import Any

import numpy as np
import torch.distributed as dist

from credit.data.sources import source_reader
from credit.data.store import store_reader
from credit.train.checkpoint import checkpoint

MOST_NUMBERS = 500  # a field of the small world has 512

_gather = dist.all_gather_object


class _Looks(pickle.Pickler):
    def reducer_override(self, found: Any) -> Any:
        assert not isinstance(found, np.ndarray) or found.size <= MOST_NUMBERS, f"{found.shape} is gathered"
        return NotImplemented


def _gather_objects(gathered: list, mine: Any, group: dist.ProcessGroup | None = None) -> None:
    _Looks(io.BytesIO()).dump(mine)
    _gather(gathered, mine, group=group)


dist.all_gather_object = _gather_objects


def _on_main_alone(module: ModuleType, name: str) -> None:
    function = getattr(module, name)

    def called(*arguments: Any, **named: Any) -> Any:
        assert not dist.is_initialized() or dist.get_rank() == 0, f"{name} on rank {dist.get_rank()}"
        return function(*arguments, **named)

    setattr(module, name, called)


_on_main_alone(source_reader, "scan_sources")
_on_main_alone(store_reader, "read_description")
_on_main_alone(checkpoint, "list_checkpoints")
