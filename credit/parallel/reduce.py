"""Sums over ranks: the norm of a sharded gradient, and figures for the log."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiable; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory; another tensor as it is. Without gradients."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def num_shards(tensor: Tensor) -> int:
    """Return into how many shards a tensor is cut: 1 for one that is whole."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(
        mesh.size(axis) for axis, placement in enumerate(tensor.placements) if shard_dim(placement) is not None
    )


def copies(tensor: Tensor) -> int:
    """Return how many ranks hold each element of `tensor`."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return world // num_shards(tensor)


def local_bounds(tensor: Tensor) -> list[slice]:
    """Return which elements of the whole tensor this rank holds, a slice for each dimension."""
    bounds = [slice(0, length) for length in tensor.shape]
    if not isinstance(tensor, DTensor):
        return bounds
    mesh = tensor.device_mesh
    # Where two axes cut the same dimension, FSDP2 has cut what tensor parallelism had left: the last axis comes first.
    for axis in reversed(range(mesh.ndim)):
        dim = shard_dim(tensor.placements[axis])
        if dim is not None:
            start, stop = bounds[dim].start, bounds[dim].stop
            length = math.ceil((stop - start) / mesh.size(axis))
            start = min(start + length * mesh.get_local_rank(axis), stop)
            bounds[dim] = slice(start, min(start + length, stop))
    return bounds


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
    world = dist.get_world_size() if dist.is_initialized() else 1
    groups: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        # a norm is taken in float32 at least
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        if isinstance(gradient, DTensor):
            groups.setdefault((copies(gradient), dtype), []).append(gradient.to_local())
        else:
            groups.setdefault((world, dtype), []).append(gradient)
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


def sum_over_shards(summands: Sequence[Tensor], sharded: Sequence[DTensor]) -> list[Tensor]:
    """Collective: return the sum of each summand over the ranks of a mesh, by one all-reduce for each mesh.

    A mesh whose ranks all belong to a larger one of these meshes takes part in the all-reduce of that.

    Args:
        summands: this rank's, each computed from its shard of a tensor; ranks with the same shard have the same one.
        sharded: for each summand the tensor that is sharded.

    Returns:
        New tensors, equal on all ranks of a mesh.
    """
    groups = {mesh: _group_of(mesh) for mesh in dict.fromkeys(tensor.device_mesh for tensor in sharded)}
    ranks = {group: set(dist.get_process_group_ranks(group)) for group in groups.values()}
    by_size = sorted(ranks, key=lambda group: len(ranks[group]), reverse=True)
    members: dict[dist.ProcessGroup, list[int]] = {}
    for index, tensor in enumerate(sharded):
        mesh_ranks = ranks[groups[tensor.device_mesh]]
        group = next(group for group in by_size if mesh_ranks <= ranks[group])
        members.setdefault(group, []).append(index)
    sums: dict[int, Tensor] = {}
    for group, indices in members.items():
        # Ranks that hold copies of a shard share the summand.
        shares = [summands[index].flatten() * (num_shards(sharded[index]) / len(ranks[group])) for index in indices]
        total = torch.cat(shares)
        dist.all_reduce(total, group=group)
        parts = total.split([len(share) for share in shares])
        sums |= {index: part.view_as(summands[index]) for index, part in zip(indices, parts, strict=True)}
    return [sums[index] for index in range(len(summands))]


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return mesh._flatten().get_group()


def mean_over_ranks(values: Tensor) -> Tensor:
    """Return the mean over all ranks of a tensor that every rank has; collective."""
    if not dist.is_initialized():
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()
