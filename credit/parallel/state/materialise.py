"""Memory and values for a model that was built on the meta device, sharded or not.

A whole tensor is the full, unsharded value of a parameter or buffer. A part is the section of it that a rank stores.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from credit.errors import ConfigError
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.dtensor import local_shard, local_slices


@torch.no_grad()
def allocate_(model: nn.Module, device: torch.device, host_parameters: bool = False) -> None:
    """Allocate memory for every parameter and buffer of a meta-device model in place, and mark all values as not set.

    The mark is NaN, or the smallest value of an integer dtype, in every element. `require_filled` checks for the mark.

    Args:
        model: model on the meta device, sharded or not.
        device: device of parameters and buffers.
        host_parameters: True to keep parameters, but not buffers, in host memory (FSDP2's CPU offload).
    """
    model.to_empty(device="cpu" if host_parameters else device)
    # Only parameters are kept in host memory; buffers are moved to the device.
    if host_parameters:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
    for tensor in named_tensors(model).values():
        local_shard(tensor).fill_(_unset_marker(tensor.dtype))


@torch.no_grad()
def fill_(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Copy whole tensors into the model in place. Each rank copies its own parts, without communication.

    Args:
        model: model with memory, for example from `allocate_`; sharded or not.
        values: pairs (name in the state dict, whole CPU tensor), the same on every rank. Only one pair is read at a
            time.
    """
    targets = named_tensors(model)
    for name, value in values:
        target = targets[name]
        assert value.shape == target.shape, f"{name}: {tuple(value.shape)} does not fill {tuple(target.shape)}"
        local_shard(target).copy_(take_local_part(value, target))


def require_filled(model: nn.Module) -> None:
    """Require that every parameter and buffer has received values since `allocate_`.

    Raises:
        ConfigError: if parameters or buffers have not received values; the message lists their names.
    """
    unset_names = [name for name, tensor in named_tensors(model).items() if _has_unset_values(local_shard(tensor))]
    if unset_names:
        raise ConfigError(
            f"model.type: {type(model).__name__} leaves {', '.join(unset_names)} without values when built on the "
            "meta device; compute a constant buffer in forward, or return its values from the module's initial_value "
            "and include the buffer in the state dict"
        )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> tensor for every parameter and buffer; the names have no prefixes of wrappers."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {strip_wrapper_prefixes(name): tensor for name, tensor in tensors}


def take_local_part(full_value: Tensor, like: Tensor) -> Tensor:
    """Return a view of this rank's part of a whole tensor.

    Args:
        full_value: whole tensor with the full shape of `like`; every rank has it.
        like: tensor, sharded or not, with the sharding that defines the part.
    """
    return full_value[tuple(local_slices(like))]


def scatter_tensor_from_rank0(full_value: Tensor | None, target: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Collective: send a whole tensor from rank 0 to all ranks; return it with the sharding and device of `target`.

    Args:
        full_value: on rank 0, whole tensor with the full shape of `target`; on other ranks, None.
        target: a parameter, buffer, or any other tensor, sharded or not.
        dtype: dtype of the result; None for the dtype of `target`. Rank 0 casts the tensor before it is sent.

    Returns:
        A new DTensor with the placements of `target`, or a new plain tensor if `target` is a plain tensor. If `target`
        is on the meta device, the result is on the device of the mesh of `target`, or on the CPU for a plain tensor.
    """
    is_sharded = isinstance(target, DTensor)
    # Sharded parameters in host memory (CPU offload) are sent from the device of the mesh. Plain tensors on the meta
    # device are sent from the CPU.
    if is_sharded:
        device = torch.device(target.device_mesh.device_type)
    elif target.is_meta:
        device = torch.device("cpu")
    else:
        device = target.device
    value = torch.empty(target.shape, dtype=dtype or target.dtype, device=device)
    if full_value is not None:
        value.copy_(full_value)
    if dist.is_initialized():
        # gloo does not support every dtype (complex, bool, uint16), so bytes are sent.
        dist.broadcast(value.view(-1).view(torch.uint8), src=0)
    # The part is copied, so that the memory of the whole tensor can be freed.
    part = take_local_part(value, target).clone()
    if target.device.type != "meta":
        part = part.to(target.device)
    if not is_sharded:
        return part
    return DTensor.from_local(
        part, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def _unset_marker(dtype: torch.dtype) -> float | int | bool:
    """Return the value that marks elements of a dtype as not set; False for bools, which have no unused value."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return False
    return torch.iinfo(dtype).min


def _has_unset_values(local_tensor: Tensor) -> bool:
    """Return True if any element has the value of `_unset_marker`; always False for bools."""
    if local_tensor.dtype == torch.bool or not local_tensor.numel():
        return False
    if local_tensor.dtype.is_floating_point or local_tensor.dtype.is_complex:
        return bool(local_tensor.isnan().any())
    return bool((local_tensor == _unset_marker(local_tensor.dtype)).any())
