"""Dispatch between kernels and their plain formulations.

A kernel is a formulation of an operation that takes less time or memory on some hardware than torch's own operators.
Each lies in a file of this folder, beside the plain formulation that computes the same with torch's operators. The
plain formulation is the reference in tests, and is used on hardware that the kernel does not suit.

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
        cpu_only: True to use the kernel on CPUs only, because GPUs have a better operator or the kernel was not
            measured on them.
        float32_only: True to use the kernel in float32 only, because in lower precision it costs more than it saves,
            or loses accuracy.
        compiled: True if `torch.compile` may trace the kernel. Otherwise the compiler gets the plain formulation,
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

# True inside `force_gpu_path`.
_emulates_gpu = False
# Names of the kernels that `plain_formulations` replaces.
_replaced_names: frozenset[str] = frozenset()


def uses(kernel: Kernel, x: Tensor) -> bool:
    """Return True if `kernel`, not its plain formulation, is to compute on `x`, given the device and dtype of `x`."""
    if kernel.name in _replaced_names:
        return False
    if torch.compiler.is_compiling() and not kernel.compiled:
        return False
    if kernel.cpu_only and not use_cpu_kernels(x):
        return False
    # Autocast computes in lower precision, even if `x` itself is float32.
    computes_in_float32 = x.dtype == torch.float32 and autocast_dtype(x) is None
    return computes_in_float32 or not kernel.float32_only


def use_cpu_kernels(x: Tensor) -> bool:
    """Return True if `x` lies on a CPU outside of `force_gpu_path`."""
    return x.device.type == "cpu" and not _emulates_gpu


@contextmanager
def force_gpu_path() -> Iterator[None]:
    """Context in which networks on a CPU take the code path of a GPU, to predict their memory and work on a GPU."""
    global _emulates_gpu
    previous = _emulates_gpu
    _emulates_gpu = True
    try:
        yield
    finally:
        _emulates_gpu = previous


@contextmanager
def plain_formulations(*kernels: Kernel) -> Iterator[None]:
    """Context in which plain formulations replace `kernels`, for tests and benchmarks."""
    global _replaced_names
    previous = _replaced_names
    _replaced_names = previous | {kernel.name for kernel in kernels}
    try:
        yield
    finally:
        _replaced_names = previous
