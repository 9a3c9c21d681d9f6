"""Products that autocast must leave in the precision of their tensors."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def without_autocast(weight: Tensor) -> contextlib.AbstractContextManager:
    """Return the context for products with `weight` that autocast would compute in bfloat16 with too few digits."""
    device = weight.device.type
    # the meta device has no autocast
    on = not weight.is_meta and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else contextlib.nullcontext()
