"""Checks of a whole (unsharded) state that rank 0 loads: its names, and that its values can be sent to all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from credit.errors import CheckpointError
from credit.parallel.blocks.marks import strip_wrapper_prefixes

# Prefix of FSDP1, which may occur anywhere in a name.
_FSDP1_PREFIX = "_fsdp_wrapped_module."
# Prefix of DDP and DataParallel, which occurs at the beginning of a name, once for each wrapper.
_DDP_PREFIX = "module."
_MAX_LISTED_PROBLEMS = 5


def unwrap_data_parallel(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel or DataParallel wrappers; return any other model unchanged."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


def map_plain_names(state: Any, names: Collection[str], label: str) -> dict[str, Any]:
    """Return a state dict with plain names as keys.

    Args:
        state: the state dict; its names may have prefixes of wrappers.
        names: plain names of the model.
        label: kind of state, for messages, such as ``"state dict"``.

    Raises:
        CheckpointError: if `state` is not a dict, a key is not a string, or two keys have the same plain name.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{label}: {type(state).__name__} instead of a dict from names to tensors")
    plain_names = list_plain_names(state, names, label)
    return dict(zip(plain_names, state.values(), strict=True))


def list_plain_names(state_names: Iterable[Any], names: Collection[str], label: str) -> list[str]:
    """Return names without the prefixes of wrappers (plain names), in the same order.

    Args:
        state_names: names in the state that is loaded.
        names: plain names of the model. A name in this collection keeps a leading ``module.``.
        label: kind of state, for messages, such as ``"state dict"``.

    Raises:
        CheckpointError: if an item of `state_names` is not a string, or two items have the same plain name.
    """
    # plain name -> name in the state
    name_of_plain: dict[str, str] = {}
    for name in state_names:
        if not isinstance(name, str):
            raise CheckpointError(f"{label}: the key {name!r} is not a name")
        plain = strip_wrapper_prefixes(name).replace(_FSDP1_PREFIX, "")
        while plain not in names and plain.startswith(_DDP_PREFIX):
            plain = plain.removeprefix(_DDP_PREFIX)
        if plain in name_of_plain:
            raise CheckpointError(
                f"{label}: {name_of_plain[plain]} and {name} are the same parameter, {plain}, without the prefixes of "
                "wrappers; remove one of these two entries"
            )
        name_of_plain[plain] = name
    return list(name_of_plain)


def describe_unsendable(value: Any, source: str) -> str | None:
    """Return the reason why a tensor cannot be sent to the ranks as a whole; None if it can, or is not a tensor.

    Args:
        value: value in a state that rank 0 loads.
        source: name of the function that returns whole values, for the message.
    """
    if isinstance(value, DTensor):
        return f"is only a rank's part (a DTensor), as in state_dict() of a sharded model; pass the result of {source}"
    if not isinstance(value, Tensor):
        return None
    if value.is_meta:
        return "has no values (it is on the meta device)"
    if value.layout != torch.strided or value.is_quantized:
        return "is a sparse or quantized tensor; only dense tensors can be loaded"
    return None


def join_problems(problems: list[str]) -> str:
    """Return the first few problems as one line, separated by semicolons."""
    listed = problems[:_MAX_LISTED_PROBLEMS]
    if len(problems) > len(listed):
        listed = [*listed, "..."]
    return "; ".join(listed)
