"""Access to this rank's part of a tensor that may be a DTensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement


def local(tensor: Tensor) -> Tensor:
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
