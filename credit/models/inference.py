"""A network whose weights stand still: what depends on them alone is made once, not in each forward."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

from credit.models.layers.spectral_norm import SpectralNorm


@torch.no_grad()
def prepare_for_inference(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Make `model`, in place, a network that only forecasts, and return it; its values stay the same to the last bit.

    Every normalised weight becomes weight / sigma. A module that computes something of its weights alone has its
    `precompute` called, and keeps that.

    Args:
        model: in eval mode, neither split nor sharded over ranks, and without adapters.
        dtype: in which autocast will compute, None without it. The weights of linear layers and convolutions are cast
            to it, where the model says by `casts_weights` that it uses them in no other; it then runs under
            autocast alone.
    """
    for module in model.modules():
        chains = module.parametrizations if parametrize.is_parametrized(module) else {}
        if len(chains) == 1 and "weight" in chains and isinstance(chains.weight[-1], SpectralNorm):
            weight = module.weight
            module.__class__ = type(module).__bases__[0]
            del module.parametrizations
            module.weight = nn.Parameter(weight, requires_grad=False)
    for module in model.modules():
        if hasattr(module, "precompute"):
            module.precompute()
    if dtype is not None and getattr(model, "casts_weights", False):
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
                for name, parameter in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
    return model
