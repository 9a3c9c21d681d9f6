"""Peak rates of this machine, measured in a few seconds: matrix products, memory and collectives.

The table of a profile shows shares of these measured peak rates. A program can therefore reach 100 % on this device
with this number of threads, which is often not true of the rates in a data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from credit.train.profile.collectives import compute_sent_bytes

_REPETITIONS = 5
_MEMORY_BYTES = 128 * 2**20
_COLLECTIVE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class MachineRates:
    """Measured peak rates of one rank.

    Attributes:
        flops: FLOP/s of a large matrix product in the precision of the network.
        memory: bytes/s that a large copy in memory reads and writes.
        collective: bytes/s that this rank sends in an all-reduce over all ranks; None with a single rank.
    """

    flops: float
    memory: float
    collective: float | None


def measure_rates(device: torch.device, dtype: torch.dtype) -> MachineRates:
    """Collective: measure the peak rates of this rank, while the other ranks do the same.

    Args:
        device: the device of this rank.
        dtype: dtype of the matrix product.
    """
    is_gpu = device.type == "cuda"
    # The matrices are large enough to reach the peak rate, and small enough for a fraction of a second.
    n = 1024
    if is_gpu:
        n = 8192
    elif torch.get_num_threads() > 4:
        n = 4096
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    # Each of the n * n results needs n multiplications and n additions.
    flops = 2 * n**3 / _time_fastest_call(lambda: a @ b, device)
    source = torch.ones(_MEMORY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    memory = 2 * _MEMORY_BYTES / _time_fastest_call(lambda: target.copy_(source), device)
    collective = None
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = torch.zeros(_COLLECTIVE_BYTES // 4, device=device)
        num_bytes = compute_sent_bytes("all_reduce", _COLLECTIVE_BYTES, _COLLECTIVE_BYTES, dist.get_world_size())
        collective = num_bytes / _time_fastest_call(lambda: dist.all_reduce(values), device)
    return MachineRates(flops, memory, collective)


def _time_fastest_call(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of `_REPETITIONS` calls of a function, after one warm-up call."""
    seconds = []
    for _ in range(_REPETITIONS + 1):
        _synchronize(device)
        start_time = time.perf_counter()
        function()
        _synchronize(device)
        seconds.append(time.perf_counter() - start_time)
    return min(seconds[1:])


def _synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
