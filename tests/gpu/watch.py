"""Fake GPU tensors, and a recorder of the places in the code where the host waits for the GPU.

Fake tensors have a device, a shape and a dtype, but no values. The rules of torch apply to them, so an operation on
tensors of different devices is an error. `no_gpu.cpp` replaces the CUDA driver if torch was built without CUDA.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
# Devices of source and result -> verb in the record.
_COPY_DIRECTIONS = {("cpu", "cuda"): "sends", ("cuda", "cpu"): "fetches"}
# Fake memory cannot be pinned, so these operations are skipped.
_PIN_OPERATIONS = (_aten.pin_memory.default, _aten._pin_memory.default)
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_REPOSITORY_FOLDERS = tuple(str(Path(__file__).parents[2] / folder) for folder in ("credit", "tests"))


class HostWaitRecorder(TorchDispatchMode):
    """Records copies and reads of values for which the host waits for the device, as `FILE:LINE description`.

    Attributes:
        seen: the records, in the order of the copies.
        dtypes: data types of matrix products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].device == CUDA:
            self._note("reads a value")
            return 0.0
        if func in _PIN_OPERATIONS:
            return args[0]
        result = func(*args, **kwargs)
        # The last tensor among the arguments is the source, also for a copy in place.
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in _PRODUCTS:
            self.dtypes.add(result.dtype)
        if tensors and isinstance(result, Tensor) and not _is_asynchronous(func, args, kwargs):
            direction = (tensors[-1].device.type, result.device.type)
            if direction in _COPY_DIRECTIONS and not (
                tensors[-1].dim() == 0 and len(tensors) > 1 and func is not _aten.copy_.default
            ):
                self._note(f"{_COPY_DIRECTIONS[direction]} {tuple(tensors[-1].shape)}")
        return result

    def _note(self, description: str) -> None:
        frames = [frame for frame in traceback.extract_stack()[:-2] if frame.filename.startswith(_REPOSITORY_FOLDERS)]
        location = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "torch"
        self.seen.append(f"{location} {description}")


def _is_asynchronous(func: Any, args: tuple, kwargs: dict) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool(dict(zip(names, args, strict=False), **kwargs).get("non_blocking", False))


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let tensors without values be on `CUDA` inside the block."""
    with (
        mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.amp.autocast_mode.torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield
