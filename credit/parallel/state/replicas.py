"""Equal parts of tensors on several ranks: one rank gets the values from elsewhere, and sends them to the others.

So a file is read once, and not once by each of a thousand replicas.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from credit.parallel.dtensor import local_shard, shard_dim
from credit.parallel.object_collectives import current_rank

# Tensors are sent together up to this size in bytes, because each broadcast takes a while however small it is.
_MAX_BUFFER_BYTES = 64 * 2**20


def is_first_replica(tensor: Tensor) -> bool:
    """Return True if this rank is the first of the ranks of a tensor's mesh that hold the same part of the tensor.

    A plain tensor is equal on all ranks of the run, so only rank 0 is the first.
    """
    if not isinstance(tensor, DTensor):
        return current_rank() == 0
    return all(tensor.device_mesh.get_local_rank(axis) == 0 for axis in _replicated_axes(tensor))


@torch.no_grad()
def broadcast_to_replicas(tensors: Iterable[Tensor]) -> None:
    """Collective: copy the part of each tensor from its first replica to the others, in place.

    Args:
        tensors: DTensors, and plain tensors that are to be equal on all ranks; the same ones in the same order on every
            rank.
    """
    if not dist.is_initialized():
        return
    # (mesh, axes along which ranks hold the same, device, dtype) -> parts. No mesh stands for all ranks.
    parts_by_key: dict[tuple[object, tuple[int, ...], torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        part = local_shard(tensor)
        if not part.numel():
            continue
        if not isinstance(tensor, DTensor):
            parts_by_key.setdefault((None, (0,), part.device, part.dtype), []).append(part)
            continue
        mesh = tensor.device_mesh
        # Parts in host memory (CPU offload) are sent from the device of the mesh, whose groups may be of GPUs alone.
        device = part.device if part.device.type == mesh.device_type else torch.device(mesh.device_type)
        axes = tuple(_replicated_axes(tensor))
        if axes:
            parts_by_key.setdefault((mesh, axes, device, part.dtype), []).append(part)
    for (mesh, axes, device, _), parts in parts_by_key.items():
        for bucket in _split_by_size(parts):
            buffer = torch.cat([part.reshape(-1) for part in bucket]).to(device)
            # After the broadcast along an axis, all ranks along it are sources for the next axis.
            for axis in axes:
                group = mesh.get_group(axis) if mesh is not None else None
                # gloo does not support every dtype (complex, bool, uint16), so bytes are sent.
                dist.broadcast(buffer.view(torch.uint8), group=group, group_src=0)
            sizes = [part.numel() for part in bucket]
            for part, values in zip(bucket, buffer.split(sizes), strict=True):
                part.copy_(values.view(part.shape))


def _replicated_axes(tensor: DTensor) -> list[int]:
    """Return the axes of a DTensor's mesh, longer than one rank, along which ranks hold the same part."""
    axes = []
    for axis, placement in enumerate(tensor.placements):
        if shard_dim(placement) is None and tensor.device_mesh.size(axis) > 1:
            axes.append(axis)
    return axes


def _split_by_size(parts: list[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in lists of at most `_MAX_BUFFER_BYTES`, or of one larger tensor."""
    buckets: list[list[Tensor]] = []
    num_bytes = 0
    for part in parts:
        num_bytes += part.nbytes
        if not buckets or num_bytes > _MAX_BUFFER_BYTES:
            buckets.append([])
            num_bytes = part.nbytes
        buckets[-1].append(part)
    return buckets
