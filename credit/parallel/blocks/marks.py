"""Blocks that a model marks with ``_fsdp2_shard``, and module names without the prefixes of wrappers."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

# Prefixes that activation checkpointing and torch.compile add to module names. Names in checkpoints do not have them.
_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module", "_orig_mod")


def is_marked(module: nn.Module) -> bool:
    """Return True if a module is marked with ``_fsdp2_shard``, on the instance or on its class.

    The result is False for a checkpoint wrapper, although the wrapper has the attributes of the marked block inside it.
    """
    return bool(getattr(module, "_fsdp2_shard", False)) and not isinstance(module, CheckpointWrapper)


def wrapped_module_ids(model: nn.Module) -> set[int]:
    """Return the `id` of each module that is directly inside a wrapper of checkpointing or of torch.compile."""
    ids = set()
    for module in model.modules():
        for prefix in _WRAPPER_PREFIXES:
            if prefix in module._modules:
                ids.add(id(module._modules[prefix]))
    return ids


def strip_wrapper_prefixes(name: str) -> str:
    """Return the name of a parameter or module without the prefixes of wrappers, as in checkpoints.

    A name without these prefixes is called plain. For example, the plain name of
    ``blocks.0._checkpoint_wrapped_module.norm.weight`` is ``blocks.0.norm.weight``.
    """
    return ".".join(component for component in name.split(".") if component not in _WRAPPER_PREFIXES)
