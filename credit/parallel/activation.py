"""Activation checkpointing of the blocks that a model marks with ``_fsdp2_shard``."""

from __future__ import annotations

import functools
from typing import Literal

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from credit.errors import ConfigError

# put into module names by wrappers; a weight's name in a checkpoint does not have them
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
# dear to compute and small against what they save: matrix products and attention
_KEPT = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
         "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention")  # fmt: skip


def is_marked(module: nn.Module) -> bool:
    """Whether a module opted in as a unit of sharding and checkpointing, as an instance or as a class."""
    return bool(getattr(module, "_fsdp2_shard", False)) and not isinstance(module, CheckpointWrapper)


def checkpoint_blocks(model: nn.Module, mode: Literal[True, "selective"] = True) -> nn.Module:
    """Make every marked block run again in the backward pass; in place, returns the model.

    What a module inside computes again by itself while its attribute ``saves_memory`` is true, it then keeps: the block
    frees it, and would have it computed twice.

    Args:
        model: its marked blocks are wrapped; those that are wrapped already stay as they are.
        mode: True keeps a block's input alone, ``selective`` also the results of matrix products and attention.

    Raises:
        ConfigError: if the model marks no block.
    """
    if not any(is_marked(module) for module in model.modules()):
        raise ConfigError(
            f"trainer.activation_checkpoint: {type(model).__name__} marks no block with _fsdp2_shard; set it to false"
        )
    options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)} if mode != True else {}  # noqa: E712
    inside = wrapped_modules(model)
    wrappers: dict[nn.Module, CheckpointWrapper] = {}
    for parent in list(model.modules()):
        # a block that is used in two places gets one wrapper
        for name, child in parent._modules.items():
            if child is not None and is_marked(child) and id(child) not in inside:
                if child not in wrappers:
                    for module in child.modules():
                        if hasattr(module, "saves_memory"):
                            module.saves_memory = False
                    wrappers[child] = checkpoint_wrapper(child, CheckpointImpl.NO_REENTRANT, **options)
                parent._modules[name] = wrappers[child]
    return model


def wrapped_modules(model: nn.Module) -> set[int]:
    """Return the ids of the modules inside a wrapper, of checkpointing or torch.compile, that stands for them."""
    return {id(m._modules[name]) for m in model.modules() for name in _WRAPPERS if name in m._modules}


def plain_name(name: str) -> str:
    """Return a parameter's or module's name without what wrappers put into it."""
    for part in _WRAPPERS:
        name = name.replace(f"{part}.", "")
    return name


def _policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    kept = op.namespace == "aten" and op._schema.name.removeprefix("aten::") in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
