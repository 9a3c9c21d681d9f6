"""Access to this rank's part of a tensor, which may be a DTensor (a tensor that is sharded or split over ranks)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, connected to autograd; return a plain tensor unchanged."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the plain tensor, detached; the result shares the memory of `tensor`."""
    detached = tensor.detach()
    if isinstance(detached, DTensor):
        return detached.to_local()
    return detached


@torch.no_grad()
def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each DTensor, and each plain tensor unchanged, without a record for autograd."""
    # `local_shard` is not called for each tensor, because the calls would take time in every optimizer step.
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def shard_dim(placement: Placement) -> int | None:
    """Return the tensor dimension that a placement splits; None for a placement that splits nothing.

    The function reads the attribute ``dim`` and does not test the class. The reason is that the strided shards of
    FSDP2 with tensor parallelism are not a subclass of torch's `Shard`.
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
    """Return this rank's part of the whole tensor, as one slice for each dimension.

    A plain tensor is whole on every rank. For a DTensor, the last ranks may store fewer elements than the other ranks,
    or no elements.
    """
    slices = [slice(0, length) for length in tensor.shape]
    if not isinstance(tensor, DTensor):
        return slices
    mesh = tensor.device_mesh
    # Two axes may split the same dimension. Tensor parallelism, the last axis, has split the dimension first, and FSDP2
    # has split the result. The axes are therefore visited from last to first.
    for axis in reversed(range(mesh.ndim)):
        dim = shard_dim(tensor.placements[axis])
        if dim is not None:
            # Like torch.chunk, DTensor gives each rank ceil(length / ranks) elements until no elements remain.
            before = slices[dim]
            shard_length = math.ceil((before.stop - before.start) / mesh.size(axis))
            start = min(before.start + shard_length * mesh.get_local_rank(axis), before.stop)
            stop = min(start + shard_length, before.stop)
            slices[dim] = slice(start, stop)
    return slices


def pad_to_shape(values: Tensor, bounds: Sequence[slice], shape: torch.Size) -> Tensor:
    """Return a tensor of `shape` with `values` at `bounds` and zeros elsewhere."""
    if values.shape == shape:
        return values
    embedded = values.new_zeros(shape)
    embedded[tuple(bounds)] = values
    return embedded


def pad_local_part(tensor: Tensor) -> Tensor:
    """Return a plain tensor of the full shape of `tensor`: this rank's part at its position, and zeros elsewhere."""
    return pad_to_shape(to_local(tensor), local_slices(tensor), tensor.shape)
