"""Cost of the optimizer Muon in a step: the matrix products, and the exchange of parts of matrices between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from credit.config.sections.trainer import TrainerConfig
from credit.hpc.planner.collectives import Collective
from credit.hpc.planner.gpus import Gpu
from credit.models.matrices import count_matrix_operations
from credit.parallel.matrix_exchange import BUCKET_ELEMENTS, assign_owners, divide_into_buckets
from credit.parallel.mesh import ParallelDims


@dataclass(frozen=True)
class MuonMatrix:
    """Matrix that Muon updates.

    Attributes:
        elements: number of elements of the whole matrix.
        element_bytes: bytes of an element.
        flops: floating-point operations of an update.
        split_axis: name of the last axis of the matrix's device mesh. The name is ``tp`` for tensor parallelism,
            ``shard`` for FSDP2 over all ranks of a replica, ``dp`` or ``dp_domain`` for FSDP2 over only these axes, and
            empty for a matrix that is not divided.
        output_dim: dimension of the weight whose length is the number of outputs of the layer.
    """

    elements: int
    element_bytes: int
    flops: float
    split_axis: str
    output_dim: int

    def num_parts(self, degrees: ParallelDims) -> int:
        """Return the number of ranks that store different parts of the matrix."""
        if not self.split_axis:
            return 1
        if self.split_axis in ("dp", "dp_domain"):
            return degrees.shard * degrees.domain
        return degrees.shard * degrees.domain * degrees.tensor

    def part_bytes(self, degrees: ParallelDims) -> int:
        """Return the bytes of the part that a rank stores, as a mean over the ranks."""
        return round(self.elements / self.num_parts(degrees)) * self.element_bytes


def read_matrices(matrices: Mapping[nn.Parameter, int]) -> tuple[MuonMatrix, ...]:
    """Return the sizes and the division of the matrices that Muon updates.

    Args:
        matrices: matrix -> index of the output dimension, see `credit.models.matrices.find_muon_matrices`.
    """
    planned_matrices = []
    for parameter, output_dim in matrices.items():
        axis = parameter.device_mesh.mesh_dim_names[-1] if isinstance(parameter, DTensor) else ""
        flops = count_matrix_operations(parameter, output_dim)
        planned_matrices.append(MuonMatrix(parameter.numel(), parameter.element_size(), flops, axis, output_dim))
    return tuple(planned_matrices)


def estimate_matrix_seconds(
    matrices: Sequence[MuonMatrix], degrees: ParallelDims, trainer: TrainerConfig, gpu: Gpu
) -> float:
    """Estimate the seconds of Muon's matrix products on the rank with the most products, without the exchange of parts.

    Args:
        matrices: matrices of the network; empty without Muon.
        degrees: number of ranks along each axis of the mesh.
        trainer: section ``trainer`` of the config, which determines the dtype of the products.
        gpu: GPU of each rank.
    """
    # Each rank computes all matrices that are not divided.
    flops = sum(matrix.flops for matrix in matrices if matrix.num_parts(degrees) == 1)
    # The ranks of a replica share the divided matrices. The ranks wait for each other after each bucket.
    for bucket, owners in _divide_work(matrices, degrees):
        work = [0.0] * (degrees.world // degrees.replicate)
        for matrix, owner in zip(bucket, owners, strict=True):
            work[owner] += matrix.flops
        flops += max(work)
    if flops == 0:
        return 0.0
    policy = trainer.fsdp2_mp_policy
    has_bfloat16_weights = policy is None or policy.param_dtype == "bfloat16"
    rate = "tf32" if trainer.tf32 else "float32"
    if trainer.amp and has_bfloat16_weights:
        rate = "bfloat16"
    return gpu.estimate_kernel_seconds(rate, flops, 0.0)


def count_matrix_collectives(matrices: Sequence[MuonMatrix], degrees: ParallelDims) -> Counter[Collective]:
    """Return the calls of the collectives with which Muon collects matrices and returns their updates.

    Each bucket of matrices needs two all-to-all exchanges. `trainer.learning_rate_factors` divides the matrices into
    more buckets. This is ignored, because the same number of bytes is then sent in more calls.

    Args:
        matrices: matrices of the network; empty without Muon.
        degrees: number of ranks along each axis of the mesh.
    """
    num_ranks = degrees.world // degrees.replicate
    # For each bucket: the bytes of the matrices that each rank owns, and the bytes of the parts that each rank stores.
    owned_bytes = []
    part_bytes = []
    for bucket, owners in _divide_work(matrices, degrees):
        bytes_by_rank = [0] * num_ranks
        for matrix, owner in zip(bucket, owners, strict=True):
            bytes_by_rank[owner] += matrix.elements * matrix.element_bytes
        owned_bytes.append(bytes_by_rank)
        part_bytes.append(sum(matrix.part_bytes(degrees) for matrix in bucket))
    collectives: Counter[Collective] = Counter()
    if owned_bytes:
        # Rank that owns the most bytes over all buckets.
        busiest = max(range(num_ranks), key=lambda rank: sum(bucket_bytes[rank] for bucket_bytes in owned_bytes))
        # First, owners receive whole matrices. Then, each rank receives its parts of all updates.
        for received_bytes in (*(bucket_bytes[busiest] for bucket_bytes in owned_bytes), *part_bytes):
            collectives[Collective("all-to-all", num_ranks, received_bytes)] += 1
    return collectives


def bound_update_bytes(matrices: Sequence[MuonMatrix], degrees: ParallelDims) -> int:
    """Return an upper bound of the bytes of temporary tensors in Muon's update on a rank.

    At this time, activations are already free. A rank stores the gradients and directions of its parts. It also stores
    copies of the matrices that it orthogonalises: a stacked copy, a normalised copy, and two products at a time.

    Args:
        matrices: matrices of the network; empty without Muon.
        degrees: number of ranks along each axis of the mesh.
    """
    replicated = [matrix for matrix in matrices if matrix.num_parts(degrees) == 1]
    # Whole matrices need no copies for an exchange. In small networks, 4.1 to 4.7 times their size was measured.
    most_bytes = 5 * min(sum(matrix.part_bytes(degrees) for matrix in replicated), 4 * BUCKET_ELEMENTS)
    for bucket, owners in _divide_work(matrices, degrees):
        bytes_by_rank = [0] * (degrees.world // degrees.replicate)
        for matrix, owner in zip(bucket, owners, strict=True):
            bytes_by_rank[owner] += matrix.elements * matrix.element_bytes
        parts = sum(matrix.part_bytes(degrees) for matrix in bucket)
        most_bytes = max(most_bytes, 3 * parts + 5 * max(bytes_by_rank))
    return most_bytes


def _divide_work(matrices: Sequence[MuonMatrix], degrees: ParallelDims) -> Iterator[tuple[list[MuonMatrix], list[int]]]:
    """Yield (matrices of a bucket, owner of each matrix) for all divided matrices; an owner is a rank number.

    Matrices on different meshes, or with different output dimensions, are in different buckets.

    Args:
        matrices: matrices of the network.
        degrees: number of ranks along each axis of the mesh.
    """
    groups: dict[tuple[str, int], list[MuonMatrix]] = {}
    for matrix in matrices:
        if matrix.num_parts(degrees) > 1:
            groups.setdefault((matrix.split_axis, matrix.output_dim), []).append(matrix)
    for group in groups.values():
        sizes = [matrix.elements / matrix.num_parts(degrees) for matrix in group]
        for indices in divide_into_buckets(sizes):
            bucket = [group[index] for index in indices]
            costs = [matrix.flops for matrix in bucket]
            yield bucket, assign_owners(costs, degrees.world // degrees.replicate)
