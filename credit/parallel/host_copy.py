"""Copies between host and GPU for which the host does not wait.

A copy from ordinary memory, and a plain `.item()`, wait until the GPU has done all that was queued before. Then it
stands still until the host has queued more. Copies through pinned memory take their turn like everything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array's values on `device`; on the CPU in its own memory."""
    host = torch.from_numpy(array)
    # torch gives pinned memory to no one else before the copy is over
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class AsyncHostCopy:
    """A tensor on its way to the host; only who asks for its values waits, and for nothing that was queued later.

    Args:
        tensor: on any device; on the CPU it is not copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._there = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            # of its own device: the current one may be another
            self._there = torch.cuda.current_stream(tensor.device).record_event()

    def get(self) -> Tensor:
        """Return the tensor on the host, when it is there."""
        if self._there is not None:
            self._there.synchronize()
        return self._host


def fetched(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors on the host; a GPU is given the next to make before, so that both work at a time."""
    coming: deque[AsyncHostCopy] = deque()
    for output in outputs:
        coming.append(AsyncHostCopy(output))
        if output.device.type == "cpu" or len(coming) > 1:
            yield coming.popleft().get()
    yield from (output.get() for output in coming)
