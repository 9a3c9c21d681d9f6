"""Broadcast of tensor parts from the first replica to the other replicas.

With a broadcast, only one of a thousand replicas has to read a file.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from credit.parallel.dtensor import local_shard, shard_dim
from credit.parallel.object_collectives import current_rank

# Largest size in bytes of tensors that are sent together. Small tensors are joined, because each broadcast has a fixed
# minimum time.
_MAX_BUFFER_BYTES = 64 * 2**20


def is_first_replica(tensor: Tensor) -> bool:
    """Return True if this rank is the first of the ranks in a tensor's mesh that store the same part of the tensor.

    A plain tensor is equal on all ranks of the run, so the first rank is rank 0.
    """
    if not isinstance(tensor, DTensor):
        return current_rank() == 0
    return all(tensor.device_mesh.get_local_rank(axis) == 0 for axis in _replicated_axes(tensor))


@torch.no_grad()
def broadcast_to_replicas(tensors: Iterable[Tensor]) -> None:
    """Collective: copy each tensor's parts in place from the first replica to the other replicas.

    Args:
        tensors: DTensors, and plain tensors that should be equal on all ranks. All ranks pass the same tensors in the
            same order.
    """
    if not dist.is_initialized():
        return
    # (mesh, axes along which ranks store equal parts, device, dtype) -> parts. The mesh None means all ranks.
    parts_by_key: dict[tuple[object, tuple[int, ...], torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        part = local_shard(tensor)
        if not part.numel():
            continue
        if not isinstance(tensor, DTensor):
            parts_by_key.setdefault((None, (0,), part.device, part.dtype), []).append(part)
            continue
        mesh = tensor.device_mesh
        # Parts in host memory (CPU offload) are sent from the device of the mesh, because the groups of the mesh may
        # communicate only between GPUs.
        device = part.device if part.device.type == mesh.device_type else torch.device(mesh.device_type)
        axes = tuple(_replicated_axes(tensor))
        if axes:
            parts_by_key.setdefault((mesh, axes, device, part.dtype), []).append(part)
    for (mesh, axes, device, _), parts in parts_by_key.items():
        for bucket in _split_by_size(parts):
            buffer = torch.cat([part.reshape(-1) for part in bucket]).to(device)
            # After the broadcast along an axis, all ranks of this axis are sources for the next axis.
            for axis in axes:
                group = mesh.get_group(axis) if mesh is not None else None
                # gloo does not support every dtype (complex, bool, uint16), so bytes are sent.
                dist.broadcast(buffer.view(torch.uint8), group=group, group_src=0)
            sizes = [part.numel() for part in bucket]
            for part, values in zip(bucket, buffer.split(sizes), strict=True):
                part.copy_(values.view(part.shape))


def _replicated_axes(tensor: DTensor) -> list[int]:
    """Return the mesh axes of a DTensor along which several ranks store the same part."""
    axes = []
    for axis, placement in enumerate(tensor.placements):
        if shard_dim(placement) is None and tensor.device_mesh.size(axis) > 1:
            axes.append(axis)
    return axes


def _split_by_size(parts: list[Tensor]) -> list[list[Tensor]]:
    """Divide tensors into lists of at most `_MAX_BUFFER_BYTES`; a larger tensor gets a separate list."""
    buckets: list[list[Tensor]] = []
    num_bytes = 0
    for part in parts:
        num_bytes += part.nbytes
        if not buckets or num_bytes > _MAX_BUFFER_BYTES:
            buckets.append([])
            num_bytes = part.nbytes
        buckets[-1].append(part)
    return buckets
