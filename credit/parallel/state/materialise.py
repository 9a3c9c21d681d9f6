"""Memory and values for a model that was built on the meta device, sharded or not."""

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
    """Give every parameter and buffer of a meta-device model memory, and no value yet, in place.

    Args:
        model: sharded or not.
        device: of parameters and buffers.
        host_parameters: keep parameters in host memory (FSDP2's CPU offload).
    """
    model.to_empty(device="cpu" if host_parameters else device)
    if host_parameters:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
    for tensor in named_tensors(model).values():
        local_shard(tensor).fill_(_unset(tensor.dtype))


@torch.no_grad()
def fill_(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Copy whole tensors into the model in place; each rank takes its own parts, without communication.

    Args:
        model: allocated.
        values: state-dict names and whole CPU tensors, the same on every rank; read one at a time.
    """
    targets = named_tensors(model)
    for name, value in values:
        target = targets[name]
        assert value.shape == target.shape, f"{name}: {tuple(value.shape)} does not fill {tuple(target.shape)}"
        local_shard(target).copy_(take_local_part(value, target))


def require_filled(model: nn.Module) -> None:
    """Check that every parameter and buffer has been given its values.

    Raises:
        ConfigError: naming those that have not.
    """
    unset_names = [name for name, tensor in named_tensors(model).items() if _is_unset(local_shard(tensor))]
    if unset_names:
        raise ConfigError(
            f"model.type: {type(model).__name__} leaves {', '.join(unset_names)} without values when built on the "
            "meta device; compute a constant buffer in forward, or draw it in its module's initial_value "
            "and let it be in the state dict"
        )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by its name in a state dict, which wrappers do not change."""
    return {strip_wrapper_prefixes(name): t for name, t in (*model.named_parameters(), *model.named_buffers())}


def take_local_part(full_value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor that every rank has, cut as `like` is."""
    return full_value[tuple(local_slices(like))]


def scatter_tensor_from_rank0(full_value: Tensor | None, target: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Collective: return this rank's part of a whole tensor that rank 0 has, cut as `target` is and on its device.

    Args:
        full_value: of the shape of `target`; None except on rank 0.
        target: a parameter, buffer, or any other tensor, sharded or not.
        dtype: of the result; that of `target` by default. Rank 0 casts, so that all ranks agree on what is sent.
    """
    is_sharded = isinstance(target, DTensor)
    # Parameters in host memory (CPU offload) are sent on the device of the mesh, those on the meta device on the CPU.
    device = torch.device(target.device_mesh.device_type) if is_sharded else target.device
    device = torch.device("cpu") if device.type == "meta" else device
    value = torch.empty(target.shape, dtype=dtype or target.dtype, device=device)
    if full_value is not None:
        value.copy_(full_value)
    if dist.is_initialized():
        # gloo does not support every dtype (complex, bool, uint16), so bytes are sent.
        dist.broadcast(value.view(-1).view(torch.uint8), src=0)
    part = take_local_part(value, target).clone()
    if target.device.type != "meta":
        part = part.to(target.device)
    if not is_sharded:
        return part
    return DTensor.from_local(
        part, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def _unset(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(part: Tensor) -> bool:
    if part.dtype == torch.bool or not part.numel():
        return False
    if part.dtype.is_floating_point or part.dtype.is_complex:
        return bool(part.isnan().any())
    return bool((part == _unset(part.dtype)).any())
