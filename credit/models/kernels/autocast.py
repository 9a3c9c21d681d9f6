"""Precision of kernels under `torch.autocast`.

Autocast casts only the arguments of the operators of torch. A kernel must set its precision explicitly if it is an
autograd function, or if its sums need more digits than bfloat16 has. Kernels use the functions of this module for this.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes on the device of `x`; None if autocast is off on this device."""
    # The meta device has no autocast, and the query would raise an error.
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Return a context that turns autocast off on the device of `x`, so operators keep the dtypes of their inputs."""
    if autocast_dtype(x) is None:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def backward_without_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the static method ``backward(ctx, *gradients)`` of an autograd function: it then turns autocast off."""

    @functools.wraps(backward)
    def wrapper(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        with without_autocast(gradients[0]):
            return backward(ctx, *gradients)

    return wrapper
