"""Division of computations on whole matrices among the ranks that store parts of these matrices.

Each matrix has one rank as its owner. The owner collects the parts of the matrix from the other ranks, computes the
result, and sends each rank its part of the result. Collecting and returning each need a single all-to-all for all
matrices. Ranks exchange only within a replica (the ranks that together store all parts once). Each replica computes
all matrices.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from credit.parallel.dtensor import local_slices, shard_dim
from credit.parallel.object_collectives import run_on_all_ranks

# Largest number of elements in a bucket, counted on each rank. The matrices of a bucket are exchanged together.
BUCKET_ELEMENTS = 2**26

# Bounds of a part of a matrix: (start, end) along each dimension.
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Transfer:
    """Part of a matrix that this rank sends to a peer or receives from it.

    Attributes:
        peer: rank that receives the part or sends it.
        matrix_index: index of the matrix.
        bounds: bounds of the part in the whole matrix.
    """

    peer: int
    matrix_index: int
    bounds: Bounds

    @property
    def shape(self) -> torch.Size:
        """Shape of the part."""
        return torch.Size(end - start for start, end in self.bounds)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select the part from the whole matrix."""
        return tuple(slice(start, end) for start, end in self.bounds)


@dataclass
class Transfers:
    """All transfers of this rank in one phase: collecting parts on the owners, or returning results from the owners.

    Attributes:
        outgoing: transfers from this rank, ordered by peer and matrix.
        incoming: transfers to this rank, ordered by peer and matrix.
    """

    outgoing: list[Transfer] = field(default_factory=list)
    incoming: list[Transfer] = field(default_factory=list)

    def sort(self) -> None:
        """Sort the transfers by peer, which an all-to-all requires; transfers with the same peer keep their order."""
        self.outgoing.sort(key=lambda transfer: transfer.peer)
        self.incoming.sort(key=lambda transfer: transfer.peer)

    def exchange(self, values: Sequence[Tensor], like: Tensor, is_local: bool) -> list[Tensor]:
        """Send the tensors of the outgoing transfers, and return the tensors of the incoming transfers.

        This call is a collective unless `is_local` is true.

        Args:
            values: tensor of each outgoing transfer.
            like: tensor with the dtype and device of the values.
            is_local: True if each rank stores all matrices whole, so that no exchange is necessary.
        """
        if is_local:
            return list(values)
        sent = torch.cat([value.reshape(-1) for value in values]) if values else like.new_empty(0)
        sizes_in = _count_elements_by_rank(self.incoming)
        received = like.new_empty(sum(sizes_in))
        dist.all_to_all_single(received, sent, sizes_in, _count_elements_by_rank(self.outgoing))
        parts = received.split([transfer.shape.numel() for transfer in self.incoming])
        return [part.view(transfer.shape) for part, transfer in zip(parts, self.incoming, strict=True)]


class MatrixExchange:
    """Plan that assigns each matrix to the rank that computes with it, and lists the parts that the ranks exchange.

    The constructor is a collective: each rank calls it with the same matrices in the same order.

    Args:
        matrices: tensors, sharded in any way or whole on each rank; only their shapes and placements are read.
        costs: amount of computation for each matrix, in any unit.

    Attributes:
        owned: indices of the matrices that this rank computes.
    """

    def __init__(self, matrices: Sequence[Tensor], costs: Sequence[float]) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._shapes = [matrix.shape for matrix in matrices]
        # Ranks of a replica are consecutive, because replicas are the outermost axis of the mesh. They need no
        # information about other replicas.
        num_neighbours = _count_ranks_without_replicas(matrices)
        first_neighbour = rank // num_neighbours * num_neighbours
        bounds_of_neighbour = _gather_bounds(matrices, range(first_neighbour, first_neighbour + num_neighbours))
        # A subset of these ranks may already store all parts, for example if all matrices are whole.
        num_members = find_replica_size(bounds_of_neighbour, self._shapes)
        self._is_local = num_members == 1
        first = rank // num_members * num_members
        members = range(first, first + num_members)
        owners = assign_owners(costs, num_members)
        self.owned = [index for index, owner in enumerate(owners) if members[owner] == rank]
        self._collecting = Transfers()
        self._returning = Transfers()
        for index, owner_number in enumerate(owners):
            owner = members[owner_number]
            # Several ranks may store the same part of a matrix that tensor parallelism does not split.
            holders: dict[Bounds, list[int]] = {}
            for member in members:
                bounds = bounds_of_neighbour[member - first_neighbour][index]
                if all(end > start for start, end in bounds):
                    holders.setdefault(bounds, []).append(member)
            for bounds, ranks in holders.items():
                source = owner if owner in ranks else ranks[index % len(ranks)]
                _add_transfer(self._collecting, rank, source, owner, index, bounds)
                for target in ranks:
                    _add_transfer(self._returning, rank, owner, target, index, bounds)
        self._collecting.sort()
        self._returning.sort()

    def apply(
        self, compute: Callable[[dict[int, Tensor]], Mapping[int, Tensor]], parts: Sequence[Tensor]
    ) -> list[Tensor]:
        """Collective: apply `compute` to all whole matrices, and return this rank's parts of the results.

        Args:
            compute: function of the matrices that this rank owns (index -> matrix). It returns the results (index ->
                tensor with the shape of the matrix).
            parts: this rank's part of each matrix; all parts have the same dtype and device.

        Returns:
            This rank's part of each result, in the order of the matrices.
        """
        matrices = {index: parts[index].new_empty(self._shapes[index]) for index in self.owned}
        # A rank always sends its whole part of a matrix.
        sent = [parts[transfer.matrix_index] for transfer in self._collecting.outgoing]
        collected = self._collecting.exchange(sent, parts[0], self._is_local)
        for transfer, values in zip(self._collecting.incoming, collected, strict=True):
            matrices[transfer.matrix_index][transfer.slices] = values
        results = compute(matrices)
        sent = [results[transfer.matrix_index][transfer.slices] for transfer in self._returning.outgoing]
        received = self._returning.exchange(sent, parts[0], self._is_local)
        returned = [torch.empty_like(part) for part in parts]
        for transfer, values in zip(self._returning.incoming, received, strict=True):
            returned[transfer.matrix_index] = values
        return returned


def _count_ranks_without_replicas(matrices: Sequence[Tensor]) -> int:
    """Return the number of all ranks divided by the length of the mesh axis ``replicate`` (1 if no matrix has it)."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    num_replicas = 1
    for matrix in matrices:
        if isinstance(matrix, DTensor) and "replicate" in (matrix.device_mesh.mesh_dim_names or ()):
            num_replicas = matrix.device_mesh["replicate"].size()
    return num_ranks // num_replicas


def _gather_bounds(matrices: Sequence[Tensor], ranks: range) -> list[list[Bounds]]:
    """Collective over `ranks`: return, for each rank in `ranks`, the bounds of the rank's part of each matrix."""
    bounds = []
    for matrix in matrices:
        bounds.append(tuple((part.start, part.stop) for part in local_slices(matrix)))
    return run_on_all_ranks(lambda: bounds, ranks)


def _add_transfer(transfers: Transfers, rank: int, source: int, target: int, index: int, bounds: Bounds) -> None:
    """Add a transfer to the transfers of this rank, if this rank is the sender or the receiver.

    Args:
        transfers: transfers of this rank.
        rank: this rank.
        source: rank that sends the part.
        target: rank that receives the part.
        index: index of the matrix.
        bounds: bounds of the part in the whole matrix.
    """
    if source == rank:
        transfers.outgoing.append(Transfer(target, index, bounds))
    if target == rank:
        transfers.incoming.append(Transfer(source, index, bounds))


def _count_elements_by_rank(transfers: Sequence[Transfer]) -> list[int]:
    """Return the total number of elements in the transfers with each rank, in the order of ranks."""
    sizes = [0] * dist.get_world_size()
    for transfer in transfers:
        sizes[transfer.peer] += transfer.shape.numel()
    return sizes


def find_replica_size(bounds_of_rank: Sequence[Sequence[Bounds]], shapes: Sequence[torch.Size]) -> int:
    """Return the smallest number of consecutive ranks that together store all parts of all matrices.

    Args:
        bounds_of_rank: for each rank, the bounds of its part of each matrix.
        shapes: shape of each matrix.
    """
    num_ranks = len(bounds_of_rank)
    for size in range(1, num_ranks):
        if num_ranks % size == 0 and _holds_all_parts(bounds_of_rank[:size], shapes):
            return size
    return num_ranks


def _holds_all_parts(bounds_of_rank: Sequence[Sequence[Bounds]], shapes: Sequence[torch.Size]) -> bool:
    """Return True if the ranks together store all parts of all matrices; for the arguments see `find_replica_size`."""
    for index, shape in enumerate(shapes):
        # The parts of two ranks are either equal or do not overlap.
        distinct_bounds = {bounds[index] for bounds in bounds_of_rank}
        num_elements = sum(Transfer(0, index, bounds).shape.numel() for bounds in distinct_bounds)
        if num_elements < shape.numel():
            return False
    return True


def count_parts(matrix: Tensor) -> int:
    """Return the number of different parts into which the ranks of a replica divide a tensor."""
    if not isinstance(matrix, DTensor):
        return 1
    num_parts = 1
    for axis, placement in enumerate(matrix.placements):
        if shard_dim(placement) is not None:
            num_parts *= matrix.device_mesh.size(axis)
    return num_parts


def divide_into_buckets(sizes: Sequence[float]) -> list[list[int]]:
    """Divide consecutive matrices into buckets of at most `BUCKET_ELEMENTS`, and return the indices in each bucket.

    A matrix with more elements gets a separate bucket.

    Args:
        sizes: number of elements of each matrix, divided by the number of its parts. These numbers are the same on
            each rank, so the buckets are, too.
    """
    buckets: list[list[int]] = []
    num_elements = 0.0
    for index, size in enumerate(sizes):
        if not buckets or num_elements + size > BUCKET_ELEMENTS:
            buckets.append([])
            num_elements = 0.0
        buckets[-1].append(index)
        num_elements += size
    return buckets


def assign_owners(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return, for each item, the rank that computes the item; the ranks get about the same amount of work.

    The most expensive items are assigned first, each to the rank with the least work so far.

    Args:
        costs: amount of work for each item, in any unit.
        num_ranks: number of ranks.
    """
    work = [(0.0, rank) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        least_work, owner = heapq.heappop(work)
        owners[index] = owner
        heapq.heappush(work, (least_work + costs[index], owner))
    return owners
