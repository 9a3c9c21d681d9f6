"""Division of work on whole matrices among ranks that hold parts of them.

Each matrix gets an owner. The owner collects the matrix from the ranks that hold its parts, computes, and sends each
rank its part of the result. Both directions are one all-to-all for all matrices together. Ranks exchange only within a
replica, the ranks that together hold all parts once; each replica computes all matrices.
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

# Largest number of elements of a rank's parts of the matrices that are exchanged and computed together.
BUCKET_ELEMENTS = 2**26

# Start and end along each dimension of the part of a matrix.
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Transfer:
    """Part of a matrix that this rank sends to a peer or receives from it.

    Attributes:
        peer: the other rank.
        matrix: index of the matrix.
        bounds: the part of the matrix.
    """

    peer: int
    matrix: int
    bounds: Bounds

    @property
    def shape(self) -> torch.Size:
        """Shape of the part."""
        return torch.Size(end - start for start, end in self.bounds)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part as indices of the whole matrix."""
        return tuple(slice(start, end) for start, end in self.bounds)


@dataclass
class Transfers:
    """All transfers of this rank in one direction, from the holders to the owners or back.

    Attributes:
        outgoing: transfers from this rank, by peer and matrix.
        incoming: transfers to this rank, by peer and matrix.
    """

    outgoing: list[Transfer] = field(default_factory=list)
    incoming: list[Transfer] = field(default_factory=list)

    def sort(self) -> None:
        """Order the transfers by the peer, as an all-to-all needs them; those with a peer stay in their order."""
        self.outgoing.sort(key=lambda transfer: transfer.peer)
        self.incoming.sort(key=lambda transfer: transfer.peer)

    def exchange(self, values: Sequence[Tensor], like: Tensor, is_local: bool) -> list[Tensor]:
        """Collective unless local: send the values of the outgoing transfers, and return those of the incoming ones.

        Args:
            values: tensor of each outgoing transfer.
            like: tensor of the dtype and on the device of the values.
            is_local: True if each rank holds all matrices whole, so that it computes them itself.
        """
        if is_local:
            return list(values)
        sent = torch.cat([value.reshape(-1) for value in values]) if values else like.new_empty(0)
        sizes_in = _sum_sizes(self.incoming)
        received = like.new_empty(sum(sizes_in))
        dist.all_to_all_single(received, sent, sizes_in, _sum_sizes(self.outgoing))
        parts = received.split([transfer.shape.numel() for transfer in self.incoming])
        return [part.view(transfer.shape) for part, transfer in zip(parts, self.incoming, strict=True)]


class MatrixExchange:
    """Plan of which rank computes which matrix, and of the parts that the ranks exchange.

    Collective: each rank builds it, with the same matrices in the same order.

    Args:
        matrices: tensors, sharded in any way or whole on each rank; only shapes and placements are read.
        costs: work of each matrix in any unit.

    Attributes:
        owned: indices of the matrices that this rank computes.
    """

    def __init__(self, matrices: Sequence[Tensor], costs: Sequence[float]) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._shapes = [matrix.shape for matrix in matrices]
        # Ranks of a replica are consecutive, because replicas are the outermost axis of the mesh. They know nothing of
        # other replicas.
        num_neighbours = _count_ranks_without_replicas(matrices)
        first_neighbour = rank // num_neighbours * num_neighbours
        bounds_of_neighbour = _gather_bounds(matrices, range(first_neighbour, first_neighbour + num_neighbours))
        # Fewer ranks may hold all parts, for example if all matrices are whole.
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
            # Several ranks may hold the same part of a matrix that tensor parallelism does not split.
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
        """Collective: return this rank's parts of the results for all matrices.

        Args:
            compute: function of the matrices that this rank owns, by index; it returns a tensor of the same shape for
                each.
            parts: this rank's part of each matrix, all of one dtype and device.

        Returns:
            This rank's part of each result, in the order of the matrices.
        """
        matrices = {index: parts[index].new_empty(self._shapes[index]) for index in self.owned}
        # A rank sends all that it holds of a matrix.
        sent = [parts[transfer.matrix] for transfer in self._collecting.outgoing]
        collected = self._collecting.exchange(sent, parts[0], self._is_local)
        for transfer, values in zip(self._collecting.incoming, collected, strict=True):
            matrices[transfer.matrix][transfer.slices] = values
        results = compute(matrices)
        sent = [results[transfer.matrix][transfer.slices] for transfer in self._returning.outgoing]
        received = self._returning.exchange(sent, parts[0], self._is_local)
        returned = [torch.empty_like(part) for part in parts]
        for transfer, values in zip(self._returning.incoming, received, strict=True):
            returned[transfer.matrix] = values
        return returned


def _count_ranks_without_replicas(matrices: Sequence[Tensor]) -> int:
    """Return the number of all ranks over the length of the mesh axis ``replicate``, which some matrices may have."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    num_replicas = 1
    for matrix in matrices:
        if isinstance(matrix, DTensor) and "replicate" in (matrix.device_mesh.mesh_dim_names or ()):
            num_replicas = matrix.device_mesh["replicate"].size()
    return num_ranks // num_replicas


def _gather_bounds(matrices: Sequence[Tensor], ranks: range) -> list[list[Bounds]]:
    """Collective over `ranks`: return for each of them the bounds of its part of each matrix."""
    bounds = []
    for matrix in matrices:
        bounds.append(tuple((part.start, part.stop) for part in local_slices(matrix)))
    return run_on_all_ranks(lambda: bounds, ranks)


def _add_transfer(transfers: Transfers, rank: int, source: int, target: int, index: int, bounds: Bounds) -> None:
    """Add a transfer between two ranks to those of this rank, if it takes part.

    Args:
        transfers: transfers of this rank.
        rank: this rank.
        source: rank that sends.
        target: rank that receives.
        index: index of the matrix.
        bounds: the part of the matrix.
    """
    if source == rank:
        transfers.outgoing.append(Transfer(target, index, bounds))
    if target == rank:
        transfers.incoming.append(Transfer(source, index, bounds))


def _sum_sizes(transfers: Sequence[Transfer]) -> list[int]:
    """Return the number of elements of the transfers with each rank."""
    sizes = [0] * dist.get_world_size()
    for transfer in transfers:
        sizes[transfer.peer] += transfer.shape.numel()
    return sizes


def find_replica_size(bounds_of_rank: Sequence[Sequence[Bounds]], shapes: Sequence[torch.Size]) -> int:
    """Return the smallest number of consecutive ranks that together hold all parts of all matrices.

    Args:
        bounds_of_rank: bounds of the part of each matrix, by rank.
        shapes: shape of each matrix.
    """
    num_ranks = len(bounds_of_rank)
    for size in range(1, num_ranks):
        if num_ranks % size == 0 and _holds_all_parts(bounds_of_rank[:size], shapes):
            return size
    return num_ranks


def _holds_all_parts(bounds_of_rank: Sequence[Sequence[Bounds]], shapes: Sequence[torch.Size]) -> bool:
    """Return True if ranks together hold all parts of all matrices; arguments as in `find_replica_size`."""
    for index, shape in enumerate(shapes):
        # Parts of different ranks are the same or do not overlap.
        distinct_bounds = {bounds[index] for bounds in bounds_of_rank}
        num_elements = sum(Transfer(0, index, bounds).shape.numel() for bounds in distinct_bounds)
        if num_elements < shape.numel():
            return False
    return True


def count_parts(matrix: Tensor) -> int:
    """Return the number of different parts into which ranks divide a tensor; replicas have the same parts."""
    if not isinstance(matrix, DTensor):
        return 1
    num_parts = 1
    for axis, placement in enumerate(matrix.placements):
        if shard_dim(placement) is not None:
            num_parts *= matrix.device_mesh.size(axis)
    return num_parts


def divide_into_buckets(sizes: Sequence[float]) -> list[list[int]]:
    """Return the indices of consecutive matrices whose sizes add up to at most `BUCKET_ELEMENTS`, or of one matrix.

    Args:
        sizes: number of elements of each matrix over the number of its parts, so that the division is the same on each
            rank.
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
    """Return the rank that computes each item, so that the ranks have about the same work.

    The most expensive items are assigned first, each to the rank with the least work so far.

    Args:
        costs: work of each item.
        num_ranks: number of ranks.
    """
    work = [(0.0, rank) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        least_work, owner = heapq.heappop(work)
        owners[index] = owner
        heapq.heappush(work, (least_work + costs[index], owner))
    return owners
