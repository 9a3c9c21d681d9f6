"""Which way a network takes where that of a CPU and that of a GPU differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_as_gpu = False


def takes_cpu_way(x: Tensor) -> bool:
    """Whether what works on `x` should take the way that suits a CPU."""
    return x.device.type == "cpu" and not _as_gpu


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let networks on a CPU take the way that they take on a GPU, to predict what they need there."""
    global _as_gpu
    before, _as_gpu = _as_gpu, True
    try:
        yield
    finally:
        _as_gpu = before
