"""Activation checkpointing of the blocks that a model marks with ``_fsdp2_shard``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from credit.errors import ConfigError
from credit.parallel.blocks.entry_points import list_custom_entry_points
from credit.parallel.blocks.marks import is_marked, wrapped_module_ids
from credit.parallel.blocks.spectral_norm_replay import NormalizedWeight, SingularVectorRecord, find_normalized_weights

# Matrix products and attention. They are expensive to compute, and their results are small compared with the other
# results that a block would save.
_SAVED_OPERATIONS = (
    "mm",
    "addmm",
    "bmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention",
)

# Contexts of the first pass and of the recomputation of a block.
_Contexts = tuple[AbstractContextManager, AbstractContextManager]


def checkpoint_blocks(model: nn.Module, mode: Literal[True, "selective"] = True) -> nn.Module:
    """Wrap every block marked with ``_fsdp2_shard`` in place, so that the backward pass recomputes it; return `model`.

    Both the forward pass of a block and the methods in its ``_fsdp2_forward_methods`` are checkpointed. Blocks that
    have already been wrapped are not changed.

    Some modules inside a block recompute results by themselves if their attribute ``saves_memory`` is true. The
    attribute is set to False, because a checkpointed block frees these results anyway. Otherwise these results would be
    computed three times.

    Args:
        model: model with marked blocks, not sharded yet.
        mode: True saves only the inputs of a block for the backward pass. ``"selective"`` also saves the results of
            matrix products and attention.

    Raises:
        ConfigError: if `mode` has a different value, or the model has no marked blocks.
    """
    if mode is not True and mode != "selective":
        raise ConfigError(f"trainer.activation_checkpoint: {mode!r} is not one of true, false, selective")
    if not any(is_marked(module) for module in model.modules()):
        raise ConfigError(
            f"trainer.activation_checkpoint: {type(model).__name__} marks no block with _fsdp2_shard; set the key to "
            "false"
        )
    inside_wrapper = wrapped_module_ids(model)
    # A block that is used in two places gets a single wrapper.
    wrappers: dict[nn.Module, CheckpointWrapper] = {}
    # The modules are listed first, because replacing children changes the result of `modules`.
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            needs_wrapper = child is not None and is_marked(child) and id(child) not in inside_wrapper
            if not needs_wrapper:
                continue
            if child not in wrappers:
                for module in child.modules():
                    if hasattr(module, "saves_memory"):
                        module.saves_memory = False
                wrappers[child] = _wrap_block(child, mode)
            parent._modules[name] = wrappers[child]
    return model


def _wrap_block(block: nn.Module, mode: Literal[True, "selective"]) -> CheckpointWrapper:
    """Return a wrapper that applies activation checkpointing to every entry point of a block.

    Args:
        block: marked block without a wrapper.
        mode: True or ``"selective"``, see `checkpoint_blocks`.
    """
    make_contexts: Callable[[], _Contexts] | None = None
    if mode == "selective":
        make_contexts = functools.partial(_build_selective_contexts, block)
    normalized_weights = find_normalized_weights(block)
    if normalized_weights:
        make_contexts = functools.partial(_build_replay_contexts, normalized_weights, make_contexts)
    # torch does not accept None for this option.
    options: dict[str, Any] = {}
    if make_contexts is not None:
        options["context_fn"] = make_contexts
    wrapper = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, **options)
    # torch's wrapper checkpoints only `forward` and returns other attributes of the block unchanged.
    for name in list_custom_entry_points(block):
        setattr(wrapper, name, functools.partial(wrapper.checkpoint_fn, getattr(block, name)))
    return wrapper


def _build_selective_contexts(block: nn.Module) -> _Contexts:
    """Return a context for the first pass of a block and a context for the recomputation.

    With these contexts, only the results of `_SAVED_OPERATIONS` are saved; other results are recomputed. If the block
    contains sharding units, the contexts do nothing, and the whole block is recomputed. The reason is that inner units
    gather their weights with different operations in the two passes, so torch cannot match the results.
    """
    has_inner_units = any(isinstance(module, FSDPModule) for module in block.modules() if module is not block)
    if has_inner_units:
        return nullcontext(), nullcontext()
    return create_selective_checkpoint_contexts(_selective_policy)


def _selective_policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    """Return the policy for the result of an operation: save or recompute. torch calls this for each operation."""
    operation = op._schema.name.removeprefix("aten::")
    if op.namespace == "aten" and operation in _SAVED_OPERATIONS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _build_replay_contexts(
    normalized_weights: list[NormalizedWeight], other_contexts: Callable[[], _Contexts] | None
) -> _Contexts:
    """Return two contexts: one records torch's spectral norm in the first pass, the other replays it when recomputing.

    Args:
        normalized_weights: weights of the block that torch's spectral norm normalizes.
        other_contexts: function that returns the contexts of selective checkpointing, which are also entered; None
            without selective checkpointing.
    """
    recorded = SingularVectorRecord(normalized_weights)
    first_pass, recomputation = nullcontext(), nullcontext()
    if other_contexts is not None:
        first_pass, recomputation = other_contexts()
    return _enter_both(recorded.record(), first_pass), _enter_both(recorded.replay(), recomputation)


@contextmanager
def _enter_both(outer: AbstractContextManager, inner: AbstractContextManager) -> Iterator[None]:
    """Context that enters two contexts, first `outer` and then `inner`."""
    with outer, inner:
        yield
