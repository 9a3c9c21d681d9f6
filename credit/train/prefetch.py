"""Batches on the device, the next one while a step computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
import torch.distributed as dist

from credit.data.samples.batch import Batch
from credit.data.samples.loader import Loader


class DevicePrefetcher(Iterator[Batch]):
    """Iterates over batches on the device and knows how long they were waited for.

    Threads get the next batches, from a store or from loader processes, while the present one is computed with, and the
    first of them is copied to the device meanwhile.

    Tensor-parallel peers work on the same samples: the first of them reads and gives them to the others, whose loaders
    are of a dataset that is a ``placeholder``.

    Args:
        loader: of the batches.
        device: where they go.
        peers: ranks that take the same batches, in step with each other; None where there are none.
    """

    def __init__(self, loader: Loader, device: torch.device, peers: dist.ProcessGroup | None = None) -> None:
        self._jobs, threads, self._close = loader.jobs()
        self._device, self._peers = device, peers
        self._waited = 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._threads = ThreadPoolExecutor(threads, "batches") if threads else None
        self._ahead: deque[Future[Batch]] = deque()
        self._copied: tuple[Batch, torch.cuda.Event | None] | None = None
        for _ in range(threads):
            self._begin_another()

    def __enter__(self) -> DevicePrefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._close()

    def __next__(self) -> Batch:
        began = time.perf_counter()
        batch, copied = self._copied or self._copy(self._take())
        self._copied = None
        if self._stream is not None and self._ahead and self._ahead[0].done() and not self._ahead[0].exception():
            self._copied = self._copy(self._take())
        self._waited += time.perf_counter() - began
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

    def _begin_another(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._ahead.append(self._threads.submit(self._fetch, job))

    def _take(self) -> Batch:
        """Return the next batch on the host."""
        if self._threads is None:
            return self._fetch(next(self._jobs))
        if not self._ahead:
            raise StopIteration
        batch = self._ahead.popleft().result()
        self._begin_another()
        return batch

    def _fetch(self, job: Callable[[], Batch]) -> Batch:
        batch = job()
        return batch if self._stream is None else batch.pin_memory()

    def _copy(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """Return the batch on the device and, on a GPU, when it will be there."""
        if self._stream is None:
            return batch.to(self._device), None
        with torch.cuda.stream(self._stream):
            return batch.to(self._device), self._stream.record_event()
