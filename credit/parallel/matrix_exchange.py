"""Division of work on whole matrices among ranks that hold parts of them.

Each matrix gets an owner. The owner collects the matrix from the ranks that hold its parts, computes, and sends each
rank its part of the result. Both directions are one all-to-all for all matrices together. So each matrix is computed
once, and a rank receives about as many elements as it holds, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from credit.parallel.dtensor import local_slices

# Start and end along each dimension of the part of a matrix.
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Transfer:
    """Part of a matrix that one rank sends to another one.

    Attributes:
        matrix: index of the matrix.
        source: rank that sends.
        target: rank that receives.
        bounds: the part of the matrix.
    """

    matrix: int
    source: int
    target: int
    bounds: Bounds

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(end - start for start, end in self.bounds)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part as indices of the whole matrix."""
        return tuple(slice(start, end) for start, end in self.bounds)


class MatrixExchange:
    """Plan of which rank computes which matrix, and of the parts that the ranks exchange.

    Collective: each rank builds it, with the same matrices in the same order.

    Args:
        matrices: tensors, sharded in any way or whole on each rank; only shapes and placements are read.
        costs: work of each matrix in any unit.

    Attributes:
        owners: rank that computes each matrix.
    """

    def __init__(self, matrices: Sequence[Tensor], costs: Sequence[float]) -> None:
        self._rank = 0
        num_ranks = 1
        if dist.is_initialized():
            self._rank = dist.get_rank()
            num_ranks = dist.get_world_size()
        self._shapes = [tuple(matrix.shape) for matrix in matrices]
        bounds_of_rank = _gather_bounds(matrices, num_ranks)
        self.owners = assign_owners(costs, num_ranks)
        self._collecting: list[Transfer] = []
        self._returning: list[Transfer] = []
        for index, owner in enumerate(self.owners):
            # Ranks with the same part, such as replicas, take turns as its source.
            holders: dict[Bounds, list[int]] = {}
            for rank in range(num_ranks):
                bounds = bounds_of_rank[rank][index]
                if all(end > start for start, end in bounds):
                    holders.setdefault(bounds, []).append(rank)
                    self._returning.append(Transfer(index, owner, rank, bounds))
            for bounds, ranks in holders.items():
                source = owner if owner in ranks else ranks[owner % len(ranks)]
                self._collecting.append(Transfer(index, source, owner, bounds))

    def apply(
        self, compute: Callable[[dict[int, Tensor]], Mapping[int, Tensor]], parts: Sequence[Tensor]
    ) -> list[Tensor]:
        """Collective: return this rank's parts of the results for all matrices.

        Args:
            compute: function of the matrices that this rank owns, by index; it returns a tensor of the same shape for
                each.
            parts: this rank's part of each matrix, all of one dtype and device.

        Returns:
            This rank's part of each result, in the order of the matrices.
        """
        matrices = {}
        for index, owner in enumerate(self.owners):
            if owner == self._rank:
                matrices[index] = parts[index].new_empty(self._shapes[index])
        # A rank sends all that it holds of a matrix.
        for transfer, values in self._send(self._collecting, lambda each: parts[each.matrix], parts):
            matrices[transfer.matrix][transfer.slices] = values
        results = compute(matrices)
        returned = [torch.empty_like(part) for part in parts]
        for transfer, values in self._send(self._returning, lambda each: results[each.matrix][each.slices], parts):
            returned[transfer.matrix].copy_(values)
        return returned

    def _send(
        self, transfers: Sequence[Transfer], read: Callable[[Transfer], Tensor], parts: Sequence[Tensor]
    ) -> list[tuple[Transfer, Tensor]]:
        """Collective: make transfers between all ranks, and return those to this rank with their values.

        Args:
            transfers: all transfers of all ranks, in the same order on each rank.
            read: function that returns the values of a transfer from this rank.
            parts: tensors of the dtype and on the device of the values.
        """
        outgoing = [transfer for transfer in transfers if transfer.source == self._rank]
        incoming = [transfer for transfer in transfers if transfer.target == self._rank]
        if not dist.is_initialized():
            return [(transfer, read(transfer)) for transfer in incoming]
        # The buffers are ordered by the other rank. Sorting keeps the order of the matrices.
        outgoing.sort(key=lambda transfer: transfer.target)
        incoming.sort(key=lambda transfer: transfer.source)
        values_out = [read(transfer).reshape(-1) for transfer in outgoing]
        sent = torch.cat(values_out) if values_out else parts[0].new_empty(0)
        sizes_out = _sum_sizes(outgoing, [transfer.target for transfer in outgoing])
        sizes_in = _sum_sizes(incoming, [transfer.source for transfer in incoming])
        received = sent.new_empty(sum(sizes_in))
        dist.all_to_all_single(received, sent, sizes_in, sizes_out)
        sizes = [torch.Size(transfer.shape).numel() for transfer in incoming]
        values_in = received.split(sizes)
        return [(each, values.view(each.shape)) for each, values in zip(incoming, values_in, strict=True)]


def _gather_bounds(matrices: Sequence[Tensor], num_ranks: int) -> list[list[Bounds]]:
    """Collective: return for each rank the bounds of its part of each matrix."""
    bounds = []
    for matrix in matrices:
        bounds.append(tuple((part.start, part.stop) for part in local_slices(matrix)))
    if num_ranks == 1:
        return [bounds]
    gathered: list[list[Bounds]] = [[] for _ in range(num_ranks)]
    dist.all_gather_object(gathered, bounds)
    return gathered


def _sum_sizes(transfers: Sequence[Transfer], peers: Sequence[int]) -> list[int]:
    """Return the number of elements of the transfers with each rank.

    Args:
        transfers: the transfers.
        peers: the other rank of each transfer.
    """
    sizes = [0] * dist.get_world_size()
    for transfer, peer in zip(transfers, peers, strict=True):
        sizes[peer] += torch.Size(transfer.shape).numel()
    return sizes


def assign_owners(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return the rank that computes each item, so that the ranks have about the same work.

    The most expensive items are assigned first, each to the rank with the least work so far.

    Args:
        costs: work of each item.
        num_ranks: number of ranks.
    """
    work = [0.0] * num_ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner = work.index(min(work))
        owners[index] = owner
        work[owner] += costs[index]
    return owners
