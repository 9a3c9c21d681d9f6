"""Plugin (``plugins: [tests.parallel.commands.forbid_large_gathers]``) that fails where a thousand ranks would.

`all_gather_object` sends the object of every rank to every rank, so no fields may be gathered. Only rank 0 may open
source files and the description of the store, and list the checkpoints.
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

# A field of the tests has 512 numbers.
MAX_NUMBERS = 500

_all_gather_object = dist.all_gather_object


class _SizeCheckingPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        assert not isinstance(obj, np.ndarray) or obj.size <= MAX_NUMBERS, f"{obj.shape} is gathered"
        return NotImplemented


def _checked_all_gather_object(objects: list, obj: Any, group: dist.ProcessGroup | None = None) -> None:
    _SizeCheckingPickler(io.BytesIO()).dump(obj)
    _all_gather_object(objects, obj, group=group)


dist.all_gather_object = _checked_all_gather_object


def _allow_on_rank0_only(module: ModuleType, name: str) -> None:
    function = getattr(module, name)

    def checked_function(*args: Any, **kwargs: Any) -> Any:
        assert not dist.is_initialized() or dist.get_rank() == 0, f"{name} on rank {dist.get_rank()}"
        return function(*args, **kwargs)

    setattr(module, name, checked_function)


_allow_on_rank0_only(source_reader, "scan_sources")
_allow_on_rank0_only(store_reader, "read_description")
_allow_on_rank0_only(checkpoint, "list_checkpoints")
