"""Function that processes the items of large fields in several threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

# Largest number of threads; more threads do not read memory faster.
_MAX_THREADS = 16
# Smallest number of cells per thread; with fewer cells, starting a thread takes longer than it saves.
_MIN_CELLS_PER_THREAD = 1 << 17
# Thread pool, empty until the first use. A forked process does not inherit the threads, so it creates a new pool.
_pool: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_pool.clear)


def thread_map(process_item: Callable[[int], None], num_items: int, cells_per_item: int) -> None:
    """Call `process_item` with each index from 0 to `num_items` - 1, in several threads.

    The number of threads is at most the number of threads of torch. If an item raises an error, no further item is
    started. The error is raised after all threads have finished their current item.

    Args:
        process_item: function of an item's index. It must write only to the memory of this item, must release the
            interpreter's lock (GIL) most of the time, and must not call `thread_map`.
        num_items: number of items.
        cells_per_item: number of array elements that `process_item` reads or writes for an item; an array that is read
            twice is counted twice. If the total number of elements is small, fewer threads are used.
    """
    # Each thread processes the next index when it is free, so a thread on a busy core processes fewer items. The
    # interpreter's lock makes the access to the shared iterator atomic.
    remaining = iter(range(num_items))

    def process_remaining() -> None:
        try:
            for number in remaining:
                process_item(number)
        except BaseException:
            # Exhaust the iterator, so that no thread starts a further item.
            for _ in remaining:
                pass
            raise

    worthwhile_threads = max(1, num_items * cells_per_item // _MIN_CELLS_PER_THREAD)
    num_threads = min(torch.get_num_threads(), _MAX_THREADS, worthwhile_threads)
    if num_threads > 1 and not _pool:
        _pool.append(ThreadPoolExecutor(_MAX_THREADS, "fields"))
    # The calling thread also processes items, so the pool runs one thread less.
    futures = [_pool[0].submit(process_remaining) for _ in range(1, num_threads)]
    try:
        process_remaining()
    finally:
        wait(futures)
    # Raise an error from a thread of the pool.
    for future in futures:
        future.result()
