"""Prefetcher that loads the next batches and copies them to the device while a step computes."""

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
from credit.utils.profiling.phases import Phase, in_phase


class DevicePrefetcher(Iterator[Batch]):
    """Iterator over batches on the device, which measures how long the caller has waited for batches.

    While the caller computes with a batch, threads load the next batches from a store or from loader processes. On a
    GPU, the next batch is copied to the device on a separate stream.

    The ranks of a tensor-parallel or ensemble group work on the same samples. The first of these ranks reads the
    batches and broadcasts them. The loaders of the other ranks have a dataset with ``placeholder`` set. This dataset
    reads nothing and returns batches of the same shapes as receive buffers.

    Args:
        loader: the loader of the batches.
        device: the device that batches are copied to.
        peers: process group of the ranks that use the same batches; None if no other rank uses them.
    """

    def __init__(self, loader: Loader, device: torch.device, peers: dist.ProcessGroup | None = None) -> None:
        self._jobs, num_threads, self._close_loader = loader.create_jobs()
        self._device = device
        self._peers = peers
        self._waited_seconds = 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Without threads, `_take_host_batch` loads each batch in the caller's thread.
        self._executor = ThreadPoolExecutor(num_threads, "batches") if num_threads else None
        self._pending: deque[Future[Batch]] = deque()
        # Next batch on the GPU, and the event that marks the end of the copy.
        self._copied: tuple[Batch, torch.cuda.Event | None] | None = None
        # Each thread loads one batch in advance.
        for _ in range(num_threads):
            self._submit_next()

    def __enter__(self) -> DevicePrefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._close_loader()

    @in_phase(Phase.LOADER)
    def __next__(self) -> Batch:
        """Collective over `peers`: return the next batch, on the device.

        Raises:
            StopIteration: after the last batch.
        """
        start_time = time.perf_counter()
        copied = self._copied
        if copied is None:
            copied = self._copy_to_device(self._take_host_batch())
        batch, copy_event = copied
        # Queue the copy of the following batch, so that the copy runs while the caller computes. There is no wait if
        # the following batch is not loaded yet.
        self._copied = None
        if self._stream is not None and self._is_next_ready():
            self._copied = self._copy_to_device(self._take_host_batch())
        self._waited_seconds += time.perf_counter() - start_time
        # The step must not start on the GPU before the copy of its batch has finished; the host does not wait.
        if copy_event is not None:
            compute_stream = torch.cuda.current_stream(self._device)
            compute_stream.wait_event(copy_event)
            # The batch was allocated on the copy stream; its memory must not be reused while a step computes with it.
            batch.record_stream(compute_stream)
        # On the other ranks of the group, the batch is a placeholder, which the broadcast overwrites.
        if self._peers is not None:
            for tensor in batch.tensors():
                dist.broadcast(tensor, group=self._peers, group_src=0)
        return batch

    def pop_wait_seconds(self) -> float:
        """Return the seconds that the caller has waited for batches since the last call of `pop_wait_seconds`."""
        seconds = self._waited_seconds
        self._waited_seconds = 0.0
        return seconds

    def _submit_next(self) -> None:
        """Start to load the next batch in a thread, if there is a further batch."""
        job = next(self._jobs, None)
        if job is not None:
            self._pending.append(self._executor.submit(self._load, job))

    def _is_next_ready(self) -> bool:
        """Return True if the next batch is loaded; False if it is not loaded yet, or if loading has failed."""
        if not self._pending:
            return False
        next_batch = self._pending[0]
        return next_batch.done() and not next_batch.exception()

    def _take_host_batch(self) -> Batch:
        """Return the next batch in host memory.

        Raises:
            StopIteration: after the last batch.
        """
        if self._executor is None:
            return self._load(next(self._jobs))
        if not self._pending:
            raise StopIteration
        batch = self._pending.popleft().result()
        self._submit_next()
        return batch

    @in_phase(Phase.LOADER)
    def _load(self, job: Callable[[], Batch]) -> Batch:
        """Run a job of the loader and return its batch, in pinned memory if the device is a GPU.

        Copies from pinned memory to a GPU are asynchronous.
        """
        batch = job()
        if self._stream is None:
            return batch
        return batch.pin_memory()

    @in_phase(Phase.COPY)
    def _copy_to_device(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """Return the batch on the device, and the event that marks the end of the copy; the event is None on a CPU."""
        if self._stream is None:
            return batch.to(self._device), None
        with torch.cuda.stream(self._stream):
            return batch.to(self._device), self._stream.record_event()
