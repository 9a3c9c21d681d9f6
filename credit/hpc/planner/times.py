"""Estimated times of the parts of an optimizer step: kernels, update and collectives."""

from __future__ import annotations

from collections.abc import Mapping

from credit.hpc.planner.collectives import Collective
from credit.hpc.planner.gpus import MEMORY_SHARE, Gpu
from credit.hpc.planner.trace import Kernel
from credit.hpc.planner.traffic import estimate_call_seconds

# Number of reads and writes of each element of a weight in an update: 8 for AdamW with clipping, 1 for the norm of the
# gradients and 3 for the moving average.
_UPDATE_MOVES = 12


def estimate_step_seconds(kernels: Mapping[Kernel, int], parameter_bytes: int, gpu: Gpu) -> float:
    """Estimate the seconds of all kernels in an optimizer step, including the update, which is not traced.

    Args:
        kernels: kernel -> number of its runs in the traced step.
        parameter_bytes: bytes of this rank's shard of the weights.
        gpu: GPU of each rank.
    """
    traced_seconds = []
    for kernel, count in kernels.items():
        seconds_per_run = gpu.estimate_kernel_seconds(kernel.rate, kernel.flops, kernel.bytes)
        traced_seconds.append(seconds_per_run * count)
    # The update needs little arithmetic, so its time is the time of its memory traffic.
    update_seconds = parameter_bytes * _UPDATE_MOVES / (gpu.memory_gbs * 1e9 * MEMORY_SHARE)
    return sum(traced_seconds) + update_seconds


def estimate_collective_seconds(collectives: Mapping[Collective, int], gpu: Gpu) -> tuple[float, float]:
    """Estimate the seconds of the collectives for which kernels wait, and of the collectives that overlap with kernels.

    Args:
        collectives: collective -> number of its calls in an optimizer step, on one rank.
        gpu: GPU of each rank.
    """
    blocking_seconds = 0.0
    overlapped_seconds = 0.0
    for collective, count in collectives.items():
        if collective.is_blocking:
            blocking_seconds += estimate_call_seconds(collective, gpu) * count
        else:
            overlapped_seconds += estimate_call_seconds(collective, gpu) * count
    return blocking_seconds, overlapped_seconds
