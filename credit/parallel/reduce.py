"""Sums over ranks: the norm of a sharded gradient, and figures for the log."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiable; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory; another tensor as it is. Without gradients."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def copies(tensor: Tensor) -> int:
    """Return how many ranks hold each element of `tensor`: all of them if it is no DTensor."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(tensor, DTensor):
        return world
    mesh = tensor.device_mesh
    return world // math.prod(mesh.size(axis) for axis, how in enumerate(tensor.placements) if cut_dim(how) is not None)


def cut_dim(placement: Placement) -> int | None:
    """Return the dimension that a placement cuts, None if it does not; strided shards are no `Shard` in torch."""
    return getattr(placement, "dim", None)


def clip_gradients_(
    parameters: Sequence[nn.Parameter], max_norm: float, flags: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Scale the gradients so that their global 2-norm is at most `max_norm`; one collective, no wait for the device.

    Parameters may lie on different meshes and be sharded, split or whole on all ranks; each element counts once.

    Args:
        parameters: those with gradients; all ranks name the same ones.
        max_norm: infinite for none.
        flags: scalars of this rank that are to be summed over all ranks by the same collective.

    Returns:
        The norm before scaling, a scalar, and the sum of each flag, (flags,); float32, equal on all ranks.
    """
    gradients = [p.grad for p in parameters]
    parts = [local_part(gradient) for gradient in gradients]
    share = torch.tensor([1.0 / copies(g) for g in gradients], dtype=torch.float32).to(
        parts[0].device, non_blocking=True
    )
    squares = torch.stack([norm.float() for norm in torch._foreach_norm(parts)]).square()
    sums = torch.stack([(squares * share).sum(), *(flag.to(share) for flag in flags)])
    if dist.is_initialized():
        dist.all_reduce(sums)
    norm = sums[0].sqrt()
    if max_norm != float("inf"):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(parts, factor.to(parts[0].dtype))
    return norm, sums[1:]


def mean_over_ranks(values: Tensor) -> Tensor:
    """Return the mean over all ranks of a tensor that every rank has; collective."""
    if not dist.is_initialized():
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()
