"""Activation checkpointing of the blocks that a model marks with ``_fsdp2_shard``."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from credit.errors import ConfigError


def apply_activation_checkpointing(model: nn.Module) -> nn.Module:
    """Make every marked block keep only its input and run again in the backward pass; in place, returns the model.

    Raises:
        ConfigError: if the model marks no block.
    """
    blocks = [module for module in model.modules() if getattr(module, "_fsdp2_shard", False)]
    if not blocks:
        raise ConfigError(
            f"trainer.activation_checkpoint: {type(model).__name__} marks no block with _fsdp2_shard; set it to false"
        )
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model
