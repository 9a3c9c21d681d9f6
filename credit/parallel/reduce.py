"""Sums over ranks: the norm of a sharded gradient, and figures for the log."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiable; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory; another tensor as it is. Without gradients."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def copies(tensor: Tensor) -> int:
    """Return how many ranks hold each element of `tensor`: all of them if it is no DTensor."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(tensor, DTensor):
        return world
    mesh = tensor.device_mesh
    return world // math.prod(
        mesh.size(axis) for axis, how in enumerate(tensor.placements) if shard_dim(how) is not None
    )


def shard_dim(placement: Placement) -> int | None:
    """Return the dimension that a placement cuts, None if it does not; strided shards are no `Shard` in torch."""
    return getattr(placement, "dim", None)


@torch.no_grad()
def gradient_norm(gradients: Sequence[Tensor], flags: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """Return the global 2-norm of gradients, and the sums of flags; one collective, no wait for the device.

    Gradients may lie on different meshes and be sharded, split or whole on all ranks; each element counts once.

    Args:
        gradients: all ranks have those of the same parameters, in the same order.
        flags: scalars of this rank, on any device, that are to be summed over all ranks by the same collective.

    Returns:
        The norm, a scalar, and the sum of each flag, (flags,); float32, where the gradients are, equal on all ranks.
    """
    groups: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        # a norm is taken in float32 at least
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        groups.setdefault((copies(gradient), dtype), []).append(local(gradient))
    squares = [
        (torch.stack(torch._foreach_norm(parts, dtype=dtype)).square().sum() / number).float()
        for (number, dtype), parts in groups.items()
    ]
    total = torch.stack(squares).sum()
    # where gradients are kept on the host it must wait for the flags, so not `non_blocking`
    sums = torch.stack([total, *(flag.to(total) for flag in flags)])
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums[0].sqrt(), sums[1:]


def mean_over_ranks(values: Tensor) -> Tensor:
    """Return the mean over all ranks of a tensor that every rank has; collective."""
    if not dist.is_initialized():
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()
