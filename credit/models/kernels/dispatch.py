"""Choice between kernels and their plain formulations.

A kernel is an implementation of an operation that takes less time or memory on some hardware than the operators of
torch. Each kernel is in a file of this folder. The same file contains a plain formulation: an implementation with the
operators of torch that has the same result. The plain formulation is the reference in tests. It also runs on hardware
on which the kernel is not faster.

The function `uses_kernel` decides whether the kernel or the plain formulation runs. `benchmarks/kernels.py` measures
the time and memory that each kernel saves.
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
        name: name of the kernel in benchmarks and in `use_plain_formulations`.
        cpu_only: True to use the kernel on CPUs only, because GPUs have a better operator or the kernel was not
            measured on GPUs.
        float32_only: True to use the kernel in float32 only, because in lower precision it is slower or less accurate
            than the plain formulation.
        can_be_traced: True if `torch.compile` may trace the kernel. If False, `torch.compile` traces the plain
            formulation and fuses its operators.
    """

    name: str
    cpu_only: bool = False
    float32_only: bool = False
    can_be_traced: bool = False


ATTENTION = Kernel("attention", cpu_only=True)
MLP = Kernel("mlp")
RECOMPUTED_NORM = Kernel("recomputed_norm", cpu_only=True, float32_only=True)
LARGE_KERNEL_CONV = Kernel("large_kernel_conv", can_be_traced=True)
MERGED_HEAD = Kernel("merged_head", can_be_traced=True)
SPHERE_PADDING = Kernel("sphere_padding", cpu_only=True)
KERNELS = (ATTENTION, MLP, RECOMPUTED_NORM, LARGE_KERNEL_CONV, MERGED_HEAD, SPHERE_PADDING)

# True inside `force_gpu_path`.
_emulates_gpu = False
# Names of the kernels that `use_plain_formulations` replaces.
_replaced_names: frozenset[str] = frozenset()


def uses_kernel(kernel: Kernel, x: Tensor) -> bool:
    """Return True if `kernel` should run instead of its plain formulation, for the device and dtype of `x`."""
    if kernel.name in _replaced_names:
        return False
    if torch.compiler.is_compiling() and not kernel.can_be_traced:
        return False
    if kernel.cpu_only and not is_cpu_path(x):
        return False
    # Autocast computes in lower precision, even if `x` is float32.
    computes_in_float32 = x.dtype == torch.float32 and autocast_dtype(x) is None
    return computes_in_float32 or not kernel.float32_only


def is_cpu_path(x: Tensor) -> bool:
    """Return True if `x` is on a CPU and the context `force_gpu_path` is not active."""
    return x.device.type == "cpu" and not _emulates_gpu


@contextmanager
def force_gpu_path() -> Iterator[None]:
    """Context in which networks on a CPU run the code path of a GPU, to predict memory and operations on a GPU."""
    global _emulates_gpu
    previous = _emulates_gpu
    _emulates_gpu = True
    try:
        yield
    finally:
        _emulates_gpu = previous


@contextmanager
def use_plain_formulations(*kernels: Kernel) -> Iterator[None]:
    """Context in which plain formulations replace `kernels`, for tests and benchmarks."""
    global _replaced_names
    previous = _replaced_names
    _replaced_names = previous | {kernel.name for kernel in kernels}
    try:
        yield
    finally:
        _replaced_names = previous
