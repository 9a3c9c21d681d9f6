"""Map a function over large fields in several threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

# More threads than this do not read memory faster.
_MAX_THREADS = 16
# Starting a thread for fewer cells costs more than it saves.
_MIN_CELLS_PER_THREAD = 1 << 17
# The pool is created when it is first needed. A forked process does not inherit the threads, so it creates a new pool.
_pool: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_pool.clear)


def thread_map(process_item: Callable[[int], None], num_items: int, cells_per_item: int) -> None:
    """Call `process_item` with each index from 0 to `num_items` - 1, in at most as many threads as torch uses.

    If an item raises an error, no further item is begun. The error is raised when all threads have finished the item
    that they had begun.

    Args:
        process_item: function of an item's index. It must write only to memory of this item, must release the
            interpreter's lock (GIL) most of the time, and must not call `thread_map`.
        num_items: number of items.
        cells_per_item: number of array elements that `process_item` reads or writes for an item. An array that it
            reads twice counts twice. Items with little work in all are processed by fewer threads.
    """
    # Each thread takes the next index when it is done, so a thread whose core is busy elsewhere takes fewer. The
    # interpreter's lock makes taking an index from the shared iterator atomic.
    remaining = iter(range(num_items))

    def process_remaining() -> None:
        try:
            for number in remaining:
                process_item(number)
        except BaseException:
            # Use up the numbers, so that no thread begins another item.
            for _ in remaining:
                pass
            raise

    worthwhile_threads = max(1, num_items * cells_per_item // _MIN_CELLS_PER_THREAD)
    num_threads = min(torch.get_num_threads(), _MAX_THREADS, worthwhile_threads)
    if num_threads > 1 and not _pool:
        _pool.append(ThreadPoolExecutor(_MAX_THREADS, "fields"))
    # This thread works too, so the pool runs one thread less.
    futures = [_pool[0].submit(process_remaining) for _ in range(1, num_threads)]
    try:
        process_remaining()
    finally:
        wait(futures)
    # Raise the error of another thread.
    for future in futures:
        future.result()
