"""Access to this rank's part of a tensor that may be a DTensor."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, with gradients; any other tensor is returned unchanged."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or any other tensor, detached; it shares the memory of `tensor`."""
    detached = tensor.detach()
    if isinstance(detached, DTensor):
        return detached.to_local()
    return detached


def shard_dim(placement: Placement) -> int | None:
    """Return the tensor dimension that a placement splits, None for one that splits nothing.

    The strided shards of FSDP2 with tensor parallelism are no subclass of `Shard` in torch, so the attribute is read.
    """
    return getattr(placement, "dim", None)


def num_shards(tensor: Tensor) -> int:
    """Return the number of parts into which a tensor is split over ranks, 1 if every rank has the whole tensor."""
    num_parts = 1
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if shard_dim(placement) is not None:
                num_parts *= tensor.device_mesh.size(axis)
    return num_parts


def local_slices(tensor: Tensor) -> list[slice]:
    """Return the part of the whole tensor that this rank holds, as one slice for each dimension.

    Every rank has the whole of a plain tensor. The last ranks may have fewer elements of a DTensor than others, or
    none.
    """
    slices = [slice(0, length) for length in tensor.shape]
    if not isinstance(tensor, DTensor):
        return slices
    mesh = tensor.device_mesh
    # Where two axes cut the same dimension, FSDP2 has cut what tensor parallelism had left: the last axis comes first.
    for axis in reversed(range(mesh.ndim)):
        dim = shard_dim(tensor.placements[axis])
        if dim is not None:
            # DTensor gives each rank ceil(length / ranks) elements until none are left, as torch.chunk does.
            start = slices[dim].start
            stop = slices[dim].stop
            length = math.ceil((stop - start) / mesh.size(axis))
            start = min(start + length * mesh.get_local_rank(axis), stop)
            slices[dim] = slice(start, min(start + length, stop))
    return slices
