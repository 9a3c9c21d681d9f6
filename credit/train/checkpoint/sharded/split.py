"""Split of a tensor over ranks, from which every rank computes the parts of all other ranks without communication.

A box is a part of a tensor, described by (start, stop) for each dimension. Ranks with the same box are replicas. The
first replica has the coordinate 0 along every mesh axis that does not split the tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from credit.errors import CheckpointError
from credit.parallel.dtensor import shard_dim

# (start, stop) for each dimension of a tensor.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Split:
    """Split of a tensor over the axes of a device mesh that contains rank 0.

    Attributes:
        sizes: number of ranks along each mesh axis.
        strides: difference between the numbers of neighbouring ranks along each mesh axis.
        dims: tensor dimension that each mesh axis splits; None for an axis along which the ranks are replicas.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dims: tuple[int | None, ...]

    @classmethod
    def of_plain_tensor(cls, num_ranks: int) -> Split:
        """Return the split of a plain tensor, of which every rank has a complete copy."""
        return cls((num_ranks,), (1,), (None,))

    @classmethod
    def of_dtensor(cls, tensor: DTensor) -> Split:
        """Return the split of a DTensor.

        Raises:
            CheckpointError: if the ranks are not evenly spaced along the axes of the device mesh.
        """
        mesh = tensor.device_mesh
        return cls(tuple(mesh.shape), _find_strides(mesh), tuple(map(shard_dim, tensor.placements)))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the position of a rank along each mesh axis; None if the rank is not in the mesh of rank 0."""
        position = [0] * len(self.sizes)
        remainder = rank
        for axis in sorted(range(len(self.sizes)), key=lambda axis: -self.strides[axis]):
            # The stride of an axis with a single rank has no meaning.
            if self.sizes[axis] > 1:
                position[axis], remainder = divmod(remainder, self.strides[axis])
        if remainder or any(index >= size for index, size in zip(position, self.sizes, strict=True)):
            return None
        return tuple(position)

    def find_first_replica(self, coordinate: tuple[int, ...]) -> int:
        """Return the lowest rank that has the same part of the tensor as the rank at `coordinate`."""
        rank = 0
        for index, stride, dim in zip(coordinate, self.strides, self.dims, strict=True):
            if dim is not None:
                rank += index * stride
        return rank

    def box_at(self, coordinate: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        """Return the part of a tensor on the rank at `coordinate`, as (start, stop) for each dimension."""
        box = [(0, length) for length in shape]
        for axis in self._list_split_axes():
            dim = self.dims[axis]
            start, stop = box[dim]
            length = _part_length(start, stop, self.sizes[axis])
            first = min(start + length * coordinate[axis], stop)
            box[dim] = (first, min(first + length, stop))
        return tuple(box)

    def find_parts(self, shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, Box]]:
        """Yield (lowest rank with this part, box of the part) for the parts of a tensor that overlap with `box`.

        A tensor without elements has a single part: the complete tensor on rank 0.

        Args:
            shape: shape of the complete tensor.
            box: box in the complete tensor.
        """
        if 0 in shape:
            yield 0, tuple((0, length) for length in shape)
            return
        # dimension -> [(offset of the rank, interval)]
        parts_by_dim: list[list[tuple[int, tuple[int, int]]]] = [[(0, (0, length))] for length in shape]
        for axis in self._list_split_axes():
            dim = self.dims[axis]
            parts = []
            for rank, (start, stop) in parts_by_dim[dim]:
                length = _part_length(start, stop, self.sizes[axis])
                lower = max(box[dim][0], start)
                upper = min(box[dim][1], stop)
                # Loop over the indices of the parts that overlap with the box.
                for index in range((lower - start) // length, math.ceil((upper - start) / length)):
                    first = start + index * length
                    parts.append((rank + index * self.strides[axis], (first, min(first + length, stop))))
            parts_by_dim[dim] = parts
        for combination in itertools.product(*parts_by_dim):
            yield sum(rank for rank, _ in combination), tuple(interval for _, interval in combination)

    def _list_split_axes(self) -> Iterator[int]:
        """Yield the mesh axes that split a tensor dimension, in the order of the splits.

        Tensor parallelism, the last axis, splits first. FSDP2 then splits the parts again, see
        `credit.parallel.dtensor.local_slices`.
        """
        for axis in reversed(range(len(self.sizes))):
            if self.dims[axis] is not None:
                yield axis


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box of a complete tensor."""
    return tuple((0, length) for length in shape)


def _part_length(start: int, stop: int, num_parts: int) -> int:
    """Return the length of the parts into which `torch.chunk` splits an interval, at least 1.

    The last parts may be shorter or empty.
    """
    return max(math.ceil((stop - start) / num_parts), 1)


def _find_strides(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the difference between the numbers of neighbouring ranks along each axis of a mesh.

    Raises:
        CheckpointError: if the differences along an axis vary.
    """
    ranks = mesh.mesh.cpu()
    strides = []
    expected_ranks = ranks.flatten()[0].clone()
    for axis, size in enumerate(ranks.shape):
        first_ranks = ranks[tuple(slice(None) if other == axis else 0 for other in range(ranks.ndim))]
        stride = int(first_ranks[1] - first_ranks[0]) if size > 1 else 1
        strides.append(stride)
        axis_shape = [size if other == axis else 1 for other in range(ranks.ndim)]
        expected_ranks = expected_ranks + (torch.arange(size) * stride).view(axis_shape)
    if min(strides) < 1 or not torch.equal(ranks, expected_ranks.expand(ranks.shape).to(ranks.dtype)):
        raise CheckpointError(
            f"a tensor is sharded over the mesh {mesh}, whose ranks are not evenly spaced; checkpoints need a mesh of "
            "init_device_mesh, or a submesh of it"
        )
    return tuple(strides)


def find_split(tensor: Tensor, num_ranks: int) -> Split:
    """Return the split of a tensor over ranks.

    Args:
        tensor: a DTensor, or a plain tensor with a complete copy on every rank.
        num_ranks: number of ranks that have a copy of a plain tensor; not used for a DTensor.
    """
    if isinstance(tensor, DTensor):
        return Split.of_dtensor(tensor)
    return Split.of_plain_tensor(num_ranks)
