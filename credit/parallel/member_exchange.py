"""Exchange of fields between the ranks that share the members of an ensemble.

A score of an ensemble compares all members in one place, and each rank has computed some of them. So the ranks change
between two divisions of the same fields: whole fields of some members, and a part of the fields of all members. No
rank ever has more than its share, and the number of bytes sent does not grow with the number of ranks.

Shape suffixes: N forecasts, all samples of one member and then those of the next, C channels, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor


class MemberExchange(ABC):
    """Base class of the exchanges.

    Args:
        group: ranks that share the members; each has the same number of them, in the order of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    @abstractmethod
    def collect(self, local_NCHW: Tensor) -> Tensor:
        """Collective: return this rank's part of the fields of all members, (ranks * N, ...).

        Args:
            local_NCHW: whole fields of this rank's members.
        """

    @abstractmethod
    def give_back(self, part_NCHW: Tensor) -> Tensor:
        """Collective: return whole fields of this rank's members, the inverse of `collect`."""


class PartExchange(MemberExchange):
    """Exchange by parts along one dimension of the fields, which may differ in length by one and be empty.

    Args:
        group: ranks that share the members.
        dim: dimension that is divided: 1 for channels, 2 for rows.
        size: its length.

    Attributes:
        dim: dimension that is divided.
    """

    def __init__(self, group: dist.ProcessGroup, dim: int, size: int) -> None:
        super().__init__(group)
        self.dim = dim
        self._slices = []
        for rank in range(self.num_ranks):
            self._slices.append(slice(rank * size // self.num_ranks, (rank + 1) * size // self.num_ranks))

    @property
    def part(self) -> slice:
        """Indices of this rank's part along the dimension."""
        return self._slices[self.rank]

    def collect(self, local_NCHW: Tensor) -> Tensor:
        """See the base class."""
        parts = [self._take(local_NCHW, rank) for rank in range(self.num_ranks)]
        sent = torch.cat([part.flatten() for part in parts])
        own_part = parts[self.rank]
        received = sent.new_empty(self.num_ranks * own_part.numel())
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=[own_part.numel()] * self.num_ranks,
            input_split_sizes=[part.numel() for part in parts],
            group=self.group,
        )
        return received.view(self.num_ranks * len(local_NCHW), *own_part.shape[1:])

    def give_back(self, part_NCHW: Tensor) -> Tensor:
        """See the base class."""
        num_forecasts = len(part_NCHW) // self.num_ranks
        shapes = []
        for part in self._slices:
            shape = [num_forecasts, *part_NCHW.shape[1:]]
            shape[self.dim] = part.stop - part.start
            shapes.append(torch.Size(shape))
        sizes = [shape.numel() for shape in shapes]
        sent = part_NCHW.contiguous().flatten()
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=sizes,
            input_split_sizes=[len(sent) // self.num_ranks] * self.num_ranks,
            group=self.group,
        )
        parts = [values.view(shape) for values, shape in zip(received.split(sizes), shapes, strict=True)]
        return torch.cat(parts, dim=self.dim)

    def _take(self, fields_NCHW: Tensor, rank: int) -> Tensor:
        """Return the part of the fields that belongs to a rank of the group, a view."""
        part = self._slices[rank]
        return fields_NCHW.narrow(self.dim, part.start, part.stop - part.start)


class WholeExchange(MemberExchange):
    """Exchange that gives every rank the whole fields of all members, for scores of which no part can be computed."""

    def collect(self, local_NCHW: Tensor) -> Tensor:
        """See the base class."""
        gathered = local_NCHW.new_empty((self.num_ranks * len(local_NCHW), *local_NCHW.shape[1:]))
        dist.all_gather_into_tensor(gathered, local_NCHW.contiguous(), group=self.group)
        return gathered

    def give_back(self, part_NCHW: Tensor) -> Tensor:
        """See the base class; every rank has computed the same, so nothing is sent."""
        num_forecasts = len(part_NCHW) // self.num_ranks
        # A copy, so that the gradients of the other members can be freed.
        return part_NCHW[self.rank * num_forecasts : (self.rank + 1) * num_forecasts].clone()
