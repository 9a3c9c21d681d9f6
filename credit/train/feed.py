"""Batches on the device, the next one while a step computes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from credit.data.batch import Batch


class BatchFeed(Iterator[Batch]):
    """Iterates over batches on the device and knows how long they were waited for.

    With loader processes, a thread takes the next batch from them and begins to copy it to the device while the present
    one is computed with: one batch is ahead. Without, batches are read when they are asked for, because source files
    are not to be read by two threads at once.

    Tensor-parallel peers work on the same samples: the first of them reads and gives them to the others, whose loaders
    are of a dataset that is ``blank``.

    Args:
        loader: of `Batch` objects.
        device: where they go.
        peers: ranks that take the same batches, in step with each other; None where there are none.
    """

    def __init__(self, loader: DataLoader, device: torch.device, peers: dist.ProcessGroup | None = None) -> None:
        self._batches = iter(loader)
        self._device, self._peers = device, peers
        self._waited = 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "batches") if loader.num_workers else None
        self._next = self._thread.submit(self._fetch) if self._thread else None

    def __enter__(self) -> BatchFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def __next__(self) -> Batch:
        began = time.perf_counter()
        if self._thread is None:
            fetched = self._fetch()
        else:
            fetched = self._next.result()
            self._next = self._thread.submit(self._fetch)
        self._waited += time.perf_counter() - began
        if fetched is None:
            raise StopIteration
        batch, copied = fetched
        if copied is not None:
            present = torch.cuda.current_stream(self._device)
            present.wait_event(copied)
            batch.record_stream(present)
        if self._peers is not None:
            for tensor in batch.tensors():
                dist.broadcast(tensor, group=self._peers, group_src=0)
        return batch

    def take_wait(self) -> float:
        """Return the seconds waited since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _fetch(self) -> tuple[Batch, torch.cuda.Event | None] | None:
        """Return the next batch and, on a GPU, when it will be there; None behind the last."""
        batch = next(self._batches, None)
        if batch is None:
            return None
        if self._stream is None:
            return batch.to(self._device), None
        with torch.cuda.stream(self._stream):
            return batch.pin_memory().to(self._device), self._stream.record_event()
