"""Preparation for inference: fold spectral norm into the weights, and cache results that depend on weights alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

from credit.models.layers.spectral_norm import SpectralNorm

# Layers whose weights autocast casts to its dtype in every call.
CAST_LAYERS = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)


@torch.no_grad()
def prepare_for_inference(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Prepare `model` in place for forecasts only, and return it; its outputs stay bitwise identical.

    Every spectrally normalised weight W is replaced with W / sigma, where sigma is the estimate of the largest singular
    value of W. Modules with a method `precompute` cache the results that depend on their weights alone. The model
    cannot be trained afterwards.

    Args:
        model: a model in eval mode, neither split nor sharded over ranks, and without LoRA adapters.
        dtype: dtype in which autocast will compute; None without autocast. If the model declares `casts_weights`, the
            weights of linear layers and convolutions are cast to this dtype. The model then runs only under
            autocast.
    """
    # Fold spectral norm into the weights. Reading `module.weight` evaluates the parametrization.
    for module in model.modules():
        if _has_spectral_norm_alone(module):
            weight = module.weight
            # When torch parametrized the weight, it gave the layer a subclass of its own. Restore the original class.
            module.__class__ = type(module).__bases__[0]
            del module.parametrizations
            module.weight = nn.Parameter(weight, requires_grad=False)
    # Results are cached after spectral norm has been folded in and before the cast, so they have full precision.
    for module in model.modules():
        if hasattr(module, "precompute"):
            module.precompute()
    if dtype is not None and getattr(model, "casts_weights", False):
        _cast_weights(model, dtype)
    return model


def _has_spectral_norm_alone(module: nn.Module) -> bool:
    """Return True if a module has no parametrized tensor except its weight, and the weight has spectral norm.

    Spectral norm must be the last parametrization of the weight.
    """
    if not parametrize.is_parametrized(module):
        return False
    chains = module.parametrizations
    return set(chains) == {"weight"} and isinstance(chains.weight[-1], SpectralNorm)


def _cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights and biases of linear layers and convolutions to `dtype`, in place."""
    for module in model.modules():
        if isinstance(module, CAST_LAYERS):
            # Make a list first, because the loop replaces the parameters that it iterates over.
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
