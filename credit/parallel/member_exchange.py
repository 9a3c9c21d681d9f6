"""Exchange of fields between the ranks that share the members of an ensemble.

A score of an ensemble compares all members at the same grid point, but each rank has computed only some of the members.
The ranks therefore convert between two divisions of the fields. In the first division, each rank has the whole fields
of some members. In the second division, each rank has a part of the fields of all members. A rank stores the same
amount of data in both divisions, and the number of bytes that it sends does not grow with the number of ranks.

Shape suffixes: N forecasts (all samples of one member, then those of the next member), C channels, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor


class MemberExchange(ABC):
    """Base class of exchanges of fields between the ranks that share the members.

    Args:
        group: ranks that share the members. Each rank has the same number of members, in the order of ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    @abstractmethod
    def collect(self, local_NCHW: Tensor) -> Tensor:
        """Collective: return this rank's part of the fields of all members, (number of ranks * N, ...).

        Args:
            local_NCHW: (N, C, H, W) whole fields of this rank's members.
        """

    @abstractmethod
    def undo_collect(self, part_NCHW: Tensor) -> Tensor:
        """Collective: undo `collect`, for example for gradients; return the fields (N, C, H, W) of this rank's members.

        Args:
            part_NCHW: this rank's part of the fields of all members, (number of ranks * N, ...).
        """


class PartExchange(MemberExchange):
    """Exchange that gives each rank a range of channels or rows of the fields.

    The lengths of the ranges differ by at most one. A range is empty if there are more ranks than channels or rows.

    Args:
        group: ranks that share the members.
        dim: tensor dimension that is divided: 1 for channels, 2 for rows.
        size: length of this dimension in the whole fields.

    Attributes:
        dim: tensor dimension that is divided.
    """

    def __init__(self, group: dist.ProcessGroup, dim: int, size: int) -> None:
        super().__init__(group)
        self.dim = dim
        self._slices = []
        for rank in range(self.num_ranks):
            start = rank * size // self.num_ranks
            stop = (rank + 1) * size // self.num_ranks
            self._slices.append(slice(start, stop))

    @property
    def part(self) -> slice:
        """Range of channels or rows that this rank receives."""
        return self._slices[self.rank]

    def collect(self, local_NCHW: Tensor) -> Tensor:
        """Collective: return this rank's channels or rows of the fields of all members, (number of ranks * N, ...)."""
        parts = [self._select_part(local_NCHW, rank) for rank in range(self.num_ranks)]
        # The buffer is flat, because the parts for different ranks may differ in length.
        send_buffer = torch.cat([part.flatten() for part in parts])
        # Every rank sends the range of this rank, which has the same shape for the members of each rank.
        local_part = parts[self.rank]
        receive_buffer = send_buffer.new_empty(self.num_ranks * local_part.numel())
        dist.all_to_all_single(
            receive_buffer,
            send_buffer,
            output_split_sizes=[local_part.numel()] * self.num_ranks,
            input_split_sizes=[part.numel() for part in parts],
            group=self.group,
        )
        # The received parts are in the order of ranks, which is the order of members.
        return receive_buffer.view(self.num_ranks * len(local_NCHW), *local_part.shape[1:])

    def undo_collect(self, part_NCHW: Tensor) -> Tensor:
        """Collective: return whole fields (N, C, H, W) of this rank's members from the parts on all ranks."""
        num_forecasts = len(part_NCHW) // self.num_ranks
        # Each rank of the group sends its range of the fields of this rank's members.
        shapes = []
        for dim_range in self._slices:
            shape = [num_forecasts, *part_NCHW.shape[1:]]
            shape[self.dim] = dim_range.stop - dim_range.start
            shapes.append(torch.Size(shape))
        sizes = [shape.numel() for shape in shapes]
        send_buffer = part_NCHW.contiguous().flatten()
        receive_buffer = send_buffer.new_empty(sum(sizes))
        dist.all_to_all_single(
            receive_buffer,
            send_buffer,
            output_split_sizes=sizes,
            input_split_sizes=[len(send_buffer) // self.num_ranks] * self.num_ranks,
            group=self.group,
        )
        # If the caller has no reference to the parts, they are freed here. There are never three copies of the fields.
        del send_buffer, part_NCHW
        flat_parts = receive_buffer.split(sizes)
        parts = [flat_part.view(shape) for flat_part, shape in zip(flat_parts, shapes, strict=True)]
        return torch.cat(parts, dim=self.dim)

    def _select_part(self, fields_NCHW: Tensor, rank: int) -> Tensor:
        """Return a view of the channels or rows of the fields that belong to a rank of the group."""
        dim_range = self._slices[rank]
        return fields_NCHW.narrow(self.dim, dim_range.start, dim_range.stop - dim_range.start)


class WholeExchange(MemberExchange):
    """Exchange that gives every rank the whole fields of all members, for scores that cannot be computed in parts."""

    def collect(self, local_NCHW: Tensor) -> Tensor:
        """Collective: return the whole fields of all members, (number of ranks * N, C, H, W)."""
        gathered = local_NCHW.new_empty((self.num_ranks * len(local_NCHW), *local_NCHW.shape[1:]))
        dist.all_gather_into_tensor(gathered, local_NCHW.contiguous(), group=self.group)
        return gathered

    def undo_collect(self, part_NCHW: Tensor) -> Tensor:
        """Return the fields (N, C, H, W) of this rank's members without communication: each rank has all fields."""
        num_forecasts = len(part_NCHW) // self.num_ranks
        first = self.rank * num_forecasts
        # A copy, so that the gradients of the other members can be freed.
        return part_NCHW[first : first + num_forecasts].clone()
