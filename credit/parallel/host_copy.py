"""Asynchronous copies between host and GPU.

A copy from ordinary memory, or a plain `.item()`, blocks the host until the GPU has finished all queued work; the GPU
then idles until the host has queued more. Copies through pinned memory are queued like any other work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the values of an array on `device`; on the CPU the tensor shares the memory of the array."""
    host = torch.from_numpy(array)
    # torch does not reuse pinned memory before the copy from it has finished.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class AsyncHostCopy:
    """Copy of a tensor to the host that has been queued; only `get` waits, and only for work queued before it.

    Args:
        tensor: on any device; on the CPU it is not copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._finished: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            # The stream of the tensor's device, since another device may be the current one.
            self._finished = torch.cuda.current_stream(tensor.device).record_event()

    def get(self) -> Tensor:
        """Return the tensor on the host; waits until the copy has finished."""
        if self._finished is not None:
            self._finished.synchronize()
        return self._host


def prefetch_to_host(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield tensors on the host; the GPU gets the next one to compute before the host waits for the present one."""
    pending: deque[AsyncHostCopy] = deque()
    for output in outputs:
        pending.append(AsyncHostCopy(output))
        if output.device.type == "cpu" or len(pending) > 1:
            yield pending.popleft().get()
    yield from (output.get() for output in pending)
