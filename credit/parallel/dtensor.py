"""Access to this rank's part of a tensor that may be a DTensor."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiable; any other tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or another tensor, without gradient and sharing its memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def shard_dim(placement: Placement) -> int | None:
    """Return the tensor dimension that a placement splits, None for one that splits nothing.

    The strided shards of FSDP2 with tensor parallelism are no subclass of `Shard` in torch, so the attribute is read.
    """
    return getattr(placement, "dim", None)


def num_shards(tensor: Tensor) -> int:
    """Return the number of parts into which a tensor is split over ranks: 1 for one that every rank holds whole."""
    shards = 1
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if shard_dim(placement) is not None:
                shards *= tensor.device_mesh.size(axis)
    return shards


def local_slices(tensor: Tensor) -> list[slice]:
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
