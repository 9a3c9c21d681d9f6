"""Dispatch between kernels and their plain formulations.

A kernel is a formulation of an operation that takes less time or memory on some hardware than torch's own operators.
Each lies in a file of this folder, beside the plain formulation that computes the same with torch's operators. The
plain formulation is the reference in tests, and the way taken on hardware that the kernel does not suit.

`uses` is the only place where the choice is made. `benchmarks/kernels.py` measures what each kernel saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from credit.models.kernels.autocast import autocast_dtype


@dataclass(frozen=True)
class Kernel:
    """Conditions under which a kernel is used.

    Attributes:
        name: name of the kernel in benchmarks and in `plain_formulations`.
        cpu_only: True if a GPU has a better operator, or if nothing was measured there.
        float32_only: True if the kernel costs more than it saves, or loses digits, in lower precision.
        compiled: True if `torch.compile` may trace the kernel. Otherwise the compiler is given the plain formulation,
            which it fuses by itself.
    """

    name: str
    cpu_only: bool = False
    float32_only: bool = False
    compiled: bool = False


ATTENTION = Kernel("attention", cpu_only=True)
MLP = Kernel("mlp")
RECOMPUTED_NORM = Kernel("recomputed_norm", cpu_only=True, float32_only=True)
LARGE_KERNEL_CONV = Kernel("large_kernel_conv", compiled=True)
MERGED_HEAD = Kernel("merged_head", compiled=True)
KERNELS = (ATTENTION, MLP, RECOMPUTED_NORM, LARGE_KERNEL_CONV, MERGED_HEAD)

_emulates_gpu = False
_replaced: frozenset[str] = frozenset()


def uses(kernel: Kernel, x: Tensor) -> bool:
    """Return whether to compute on `x` with `kernel` instead of its plain formulation."""
    if kernel.name in _replaced:
        return False
    if torch.compiler.is_compiling() and not kernel.compiled:
        return False
    if kernel.cpu_only and not use_cpu_kernels(x):
        return False
    computes_in_float32 = x.dtype == torch.float32 and autocast_dtype(x) is None
    return computes_in_float32 or not kernel.float32_only


def use_cpu_kernels(x: Tensor) -> bool:
    """Return whether `x` lies on a CPU, and no GPU is emulated."""
    return x.device.type == "cpu" and not _emulates_gpu


@contextmanager
def force_gpu_path() -> Iterator[None]:
    """Let networks on a CPU compute as they do on a GPU, to predict what they need there."""
    global _emulates_gpu
    before = _emulates_gpu
    _emulates_gpu = True
    try:
        yield
    finally:
        _emulates_gpu = before


@contextmanager
def plain_formulations(*kernels: Kernel) -> Iterator[None]:
    """Replace these kernels by their plain formulations, for tests and benchmarks."""
    global _replaced
    before = _replaced
    _replaced = before | {kernel.name for kernel in kernels}
    try:
        yield
    finally:
        _replaced = before
