"""Runs code on a GPU that is not there, and notes where the host waits for it.

Tensors are fake: they have a device, a shape and a dtype, and no values. torch's own rules hold for them, so tensors of
different devices must not meet. `no_gpu.cpp` stands for the driver where torch has none.
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
# from where to where
_WAYS = {("cpu", "cuda"): "sends", ("cuda", "cpu"): "fetches"}
# fake memory cannot be pinned
_PINS = (_aten.pin_memory.default, _aten._pin_memory.default)
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_OURS = tuple(str(Path(__file__).parents[2] / folder) for folder in ("credit", "tests"))


class Watch(TorchDispatchMode):
    """Notes, as `FILE:LINE what`, where values come from the device or go to it while the host waits.

    Attributes:
        seen: the notes, in their order.
        dtypes: of matrix products.
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
        if func in _PINS:
            return args[0]
        result = func(*args, **kwargs)
        # of a copy in place the last is where it comes from
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in _PRODUCTS:
            self.dtypes.add(result.dtype)
        if given and isinstance(result, Tensor) and not _is_asynchronous(func, args, kwargs):
            way = (given[-1].device.type, result.device.type)
            if way in _WAYS and not (given[-1].dim() == 0 and len(given) > 1 and func is not _aten.copy_.default):
                self._note(f"{_WAYS[way]} {tuple(given[-1].shape)}")
        return result

    def _note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack()[:-2] if frame.filename.startswith(_OURS)]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "torch"
        self.seen.append(f"{where} {what}")


def _is_asynchronous(func: Any, args: tuple, kwargs: dict) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool(dict(zip(names, args, strict=False), **kwargs).get("non_blocking", False))


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let tensors be on `CUDA`, without values, inside of the block."""
    with (
        mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.amp.autocast_mode.torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield
