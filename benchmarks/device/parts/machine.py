"""Device: its description, and its rates of matrix products, memory access, copies and kernel launches.

The other parts use the rates of matrix products as the peak rates of their MFU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.device.accelerator import Accelerator
from benchmarks.device.context import Context, time_steps
from benchmarks.device.parts import Row
from credit.hpc.planner.gpus import find_peak_rates

# Name of a peak rate -> dtype of the factors, and torch's precision of float32 products.
_RATES = {
    "bfloat16": (torch.bfloat16, "high"),
    "tf32": (torch.float32, "high"),
    "float32": (torch.float32, "highest"),
}


def run(context: Context) -> Iterator[Row]:
    """Yield rows with the properties of the device, and with its measured rates next to the rates of its data sheet."""
    accelerator = context.accelerator
    description = accelerator.describe()
    for name, value in description.items():
        yield {"case": name, "value": value}
    sheet = find_peak_rates(str(description["device"]))
    peaks = measure_peaks(accelerator, context.fast)
    for name, peak in peaks.items():
        share = peak / sheet[name] if sheet else None
        yield {"case": f"matrix products, {name}", "value": peak, "unit": "TFLOP/s", "share of the data sheet": share}
    megabytes = 8 if context.fast else 1024
    values = torch.ones(megabytes * 2**18, device=accelerator.device)
    # Reads one field and writes another one.
    timing = time_steps(accelerator, lambda: values * 2.0, 0.3)
    yield {"case": "memory, read and written", "value": 2 * values.nbytes / timing.median / 1e9, "unit": "GB/s"}
    yield from _measure_copies(context, megabytes)
    small = torch.zeros(64, device=accelerator.device)

    def add_often() -> None:
        for _ in range(1000):
            small.add_(1.0)

    timing = time_steps(accelerator, add_often, 0.3)
    yield {"case": "time of an operator on 64 numbers", "value": timing.median * 1e3, "unit": "us"}


def _measure_copies(context: Context, megabytes: int) -> Iterator[Row]:
    """Yield the rates of copies from the host: from ordinary memory and, on a GPU, from pinned memory."""
    accelerator = context.accelerator
    host = torch.ones(megabytes * 2**16)
    on_device = torch.empty_like(host, device=accelerator.device)
    kinds = {"ordinary": host}
    if accelerator.is_gpu:
        kinds["pinned"] = host.pin_memory()
    for kind, source in kinds.items():

        def copy(source: Tensor = source) -> None:
            on_device.copy_(source, non_blocking=True)

        timing = time_steps(accelerator, copy, 0.3)
        yield {"case": f"copy to the device, {kind} memory", "value": host.nbytes / timing.median / 1e9, "unit": "GB/s"}


@functools.cache
def measure_peaks(accelerator: Accelerator, fast: bool) -> dict[str, float]:
    """Return the rates of large matrix products in TFLOP/s, by the name of the rate; measured once in a process."""
    size = 256 if fast else 8192
    previous = torch.get_float32_matmul_precision()
    peaks = {}
    try:
        for name, (dtype, precision) in _RATES.items():
            torch.set_float32_matmul_precision(precision)
            left = torch.randn(size, size, device=accelerator.device, dtype=dtype)
            right = torch.randn(size, size, device=accelerator.device, dtype=dtype)
            product = functools.partial(torch.mm, left, right)
            timing = time_steps(accelerator, product, 0.5)
            peaks[name] = 2 * size**3 / timing.least / 1e12
    finally:
        torch.set_float32_matmul_precision(previous)
    return peaks
