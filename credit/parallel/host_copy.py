"""Asynchronous copies between host and GPU.

A copy between the GPU and ordinary host memory, or a plain `.item()`, blocks the host until the GPU has finished all
queued work. The GPU is then idle until the host queues more work. Copies through pinned memory do not block the host:
they are queued like kernels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return an array or a CPU tensor as a tensor on `device`, with the same shape and dtype.

    If `device` is a GPU, the copy is queued and the call does not wait. If it is the CPU, the result shares the memory
    of `values`.
    """
    host_tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type != "cuda":
        return host_tensor.to(device)
    # torch does not reuse the pinned memory before the copy has finished.
    return host_tensor.pin_memory().to(device, non_blocking=True)


class AsyncHostCopy:
    """Copy of a tensor to the host; the copy is queued on the GPU without blocking the host.

    Only `get` waits: for the copy and the work that was queued before the copy, not for later work.

    Args:
        tensor: tensor on any device; a tensor on the CPU is not copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host_tensor = tensor
        self._copy_finished: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host_tensor.copy_(tensor, non_blocking=True)
            # The stream belongs to the device of the tensor, which may differ from the current device.
            self._copy_finished = torch.cuda.current_stream(tensor.device).record_event()

    def get(self) -> Tensor:
        """Wait until the copy has finished, and return the tensor on the host, with the same shape and dtype."""
        if self._copy_finished is not None:
            self._copy_finished.synchronize()
        return self._host_tensor


def prefetch_to_host(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of `outputs` on the host; while the caller uses a tensor, the GPU computes the next tensor.

    Args:
        outputs: iterable that computes its tensors lazily, on any device. Tensors on the CPU are yielded at once.
    """
    pending: deque[AsyncHostCopy] = deque()
    # A GPU output is yielded only after the work for the next output has been queued.
    for output in outputs:
        pending.append(AsyncHostCopy(output))
        if output.device.type == "cpu" or len(pending) > 1:
            yield pending.popleft().get()
    # No output follows the last copy.
    for copy in pending:
        yield copy.get()
