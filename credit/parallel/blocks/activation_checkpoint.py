"""Activation checkpointing of the blocks that a model marks with ``_fsdp2_shard``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from credit.errors import ConfigError
from credit.parallel.blocks.entry_points import custom_entries

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

    That holds for its forward and for the entry points that it names in ``_fsdp2_forward_methods``.

    What a module inside computes again by itself while its attribute ``saves_memory`` is true, it then keeps: the block
    frees it, and would have it computed twice. torch's own spectral norm iterates in every forward in training; a block
    that runs again finds the vectors that it had at each of its calls, and leaves the present ones alone.

    Args:
        model: its marked blocks are wrapped; those that are wrapped already stay as they are.
        mode: True keeps a block's input alone, ``selective`` also the results of matrix products and attention.

    Raises:
        ConfigError: for another mode, or if the model marks no block.
    """
    if mode is not True and mode != "selective":
        raise ConfigError(f"trainer.activation_checkpoint: {mode!r} is not one of true, false, selective")
    if not any(is_marked(module) for module in model.modules()):
        raise ConfigError(
            f"trainer.activation_checkpoint: {type(model).__name__} marks no block with _fsdp2_shard; set it to false"
        )
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
                    wrappers[child] = _wrapped(child, mode)
                parent._modules[name] = wrappers[child]
    return model


def _wrapped(block: nn.Module, mode: Literal[True, "selective"]) -> CheckpointWrapper:
    """Return the wrapper that checkpoints every entry point of a block.

    torch's wrapper does so for forward; other attributes it takes from the block as they are.
    """
    wrapper = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, **_options(mode, block))
    for name in custom_entries(block):
        setattr(wrapper, name, functools.partial(wrapper.checkpoint_fn, getattr(block, name)))
    return wrapper


def wrapped_modules(model: nn.Module) -> set[int]:
    """Return the ids of the modules inside a wrapper, of checkpointing or torch.compile, that stands for them."""
    return {id(m._modules[name]) for m in model.modules() for name in _WRAPPERS if name in m._modules}


def plain_name(name: str) -> str:
    """Return a parameter's or module's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _options(mode: Literal[True, "selective"], block: nn.Module) -> dict[str, Any]:
    """Return what makes the contexts of a block's forward and of its recomputation, if there are any."""
    selective = functools.partial(_selective_contexts, block) if mode == "selective" else None
    iterated = _iterated_by_torch(block)
    if iterated:
        return {"context_fn": functools.partial(_with_vectors, iterated, selective)}
    return {} if selective is None else {"context_fn": selective}


def _selective_contexts(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of one forward of `block` and of its recomputation that keep what `_policy` says.

    Sharding units inside gather their weights in both, but with other operations, whose results cannot be matched. So a
    block that has some is computed again as a whole.
    """
    if any(isinstance(module, FSDPModule) for module in block.modules() if module is not block):
        return nullcontext(), nullcontext()
    return create_selective_checkpoint_contexts(_policy)


def _with_vectors(
    iterated: list[_Iterated], others: Callable[[], tuple[AbstractContextManager, AbstractContextManager]] | None
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of one forward, and those of `others`, in one."""
    vectors: list[_Calls] = [[] for _ in iterated]
    first, again = (nullcontext(), nullcontext()) if others is None else others()
    return _both(_remembered(iterated, vectors), first), _both(_recalled(iterated, vectors), again)


@contextmanager
def _both(one: AbstractContextManager, other: AbstractContextManager) -> Iterator[None]:
    with one, other:
        yield


# what holds n_power_iterations, the module with the vectors, their names
_Iterated = tuple[Any, nn.Module, tuple[str, str]]
# the vectors of one call after the other, by name
_Calls = list[dict[str, Any]]


def _iterated_by_torch(block: nn.Module) -> list[_Iterated]:
    """Return the weights below `block` that torch's own spectral norm, by hooks or as a parametrization, normalises."""
    hooked = [
        (hook, module, (f"{hook.name}_u", f"{hook.name}_v"))
        for module in block.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, SpectralNorm)
    ]
    return hooked + [(m, m, ("_u", "_v")) for m in block.modules() if isinstance(m, _SpectralNorm) and hasattr(m, "_u")]


@contextmanager
def _remembered(iterated: list[_Iterated], vectors: list[_Calls]) -> Iterator[None]:
    """Keep the vectors that each call in a forward computes with; where there is none, those that it ends with."""

    def keep(kept: _Calls, names: tuple[str, str], module: nn.Module, *_: Any) -> None:
        kept.append({name: module._buffers[name].clone() for name in names})

    with ExitStack() as hooks:
        for (one, module, names), kept in zip(iterated, vectors, strict=True):
            # a hook of torch iterates before the layer's forward and before hooks that come later
            register = module.register_forward_hook if one is module else module.register_forward_pre_hook
            hooks.enter_context(register(functools.partial(keep, kept, names)))
        yield
    for (_, module, names), kept in zip(iterated, vectors, strict=True):
        if not kept:
            keep(kept, names, module)


@contextmanager
def _recalled(iterated: list[_Iterated], vectors: list[_Calls]) -> Iterator[None]:
    """Put the vectors of each call in place of the present ones, and do not iterate."""

    def place(calls: Iterator[dict[str, Any]], module: nn.Module, *_: Any) -> None:
        # a last call's vectors stay
        module._buffers.update(next(calls, {}))

    present = [({name: module._buffers[name] for name in names}, one.n_power_iterations)
               for one, module, names in iterated]  # fmt: skip
    try:
        with ExitStack() as hooks:
            for (one, module, _), kept in zip(iterated, vectors, strict=True):
                one.n_power_iterations = 0
                before = functools.partial(place, iter(kept))
                hooks.enter_context(module.register_forward_pre_hook(before, prepend=True))
            yield
    finally:
        for (one, module, _), (live, iterations) in zip(iterated, present, strict=True):
            module._buffers.update(live)
            one.n_power_iterations = iterations


def _policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    kept = op.namespace == "aten" and op._schema.name.removeprefix("aten::") in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
