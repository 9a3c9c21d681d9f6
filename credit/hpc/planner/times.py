"""Estimated times of the parts of an optimizer step: kernels, update, Muon's products and collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from credit.config.sections.trainer import TrainerConfig
from credit.hpc.planner.gpus import MEMORY_SHARE, Gpu
from credit.hpc.planner.trace import Collective, Kernel
from credit.hpc.planner.traffic import estimate_seconds
from credit.parallel.matrix_exchange import assign_owners
from credit.parallel.mesh import ParallelDims

# Number of times that an update reads or writes an element of each weight: 8 for AdamW with clipping, 1 for the norm of
# the gradients and 3 for the moving average.
_UPDATE_MOVES = 12


def estimate_step_seconds(kernels: Mapping[Kernel, int], parameter_bytes: int, gpu: Gpu) -> float:
    """Return the seconds of all kernels of an optimizer step, including the update, which is not traced.

    Args:
        kernels: kernel -> number of its runs in the traced step.
        parameter_bytes: bytes of this rank's shard of the weights.
        gpu: the GPU of each rank.
    """
    traced_seconds = []
    for kernel, count in kernels.items():
        seconds_per_run = gpu.estimate_kernel_seconds(kernel.rate, kernel.flops, kernel.bytes)
        traced_seconds.append(seconds_per_run * count)
    # The update does little arithmetic, so its time is that of its memory traffic.
    update_seconds = parameter_bytes * _UPDATE_MOVES / (gpu.memory_gbs * 1e9 * MEMORY_SHARE)
    return sum(traced_seconds) + update_seconds


def estimate_matrix_seconds(
    matrix_flops: Sequence[float], degrees: ParallelDims, trainer: TrainerConfig, gpu: Gpu
) -> float:
    """Return the seconds of Muon's products on the rank with most of them; their exchange is not counted.

    Args:
        matrix_flops: floating-point operations for each matrix of the network; empty without Muon.
        degrees: number of ranks along each axis of the mesh; the ranks of a replica divide the matrices among them.
        trainer: section ``trainer`` of the config, which decides on the dtype of the products.
        gpu: the GPU of each rank.
    """
    if not matrix_flops:
        return 0.0
    num_ranks = degrees.world // degrees.replicate
    work = [0.0] * num_ranks
    for flops, owner in zip(matrix_flops, assign_owners(matrix_flops, num_ranks), strict=True):
        work[owner] += flops
    rate = "tf32" if trainer.tf32 else "float32"
    if trainer.amp:
        rate = "bfloat16"
    return gpu.estimate_kernel_seconds(rate, max(work), 0.0)


def estimate_collective_seconds(collectives: Mapping[Collective, int], gpu: Gpu) -> tuple[float, float]:
    """Return the seconds of the collectives that kernels wait for, and of those that run together with kernels.

    Args:
        collectives: collective -> number of its calls in an optimizer step, on one rank.
        gpu: the GPU of each rank.
    """
    blocking_seconds = 0.0
    overlapped_seconds = 0.0
    for collective, count in collectives.items():
        if collective.blocks:
            blocking_seconds += estimate_seconds(collective, gpu) * count
        else:
            overlapped_seconds += estimate_seconds(collective, gpu) * count
    return blocking_seconds, overlapped_seconds
