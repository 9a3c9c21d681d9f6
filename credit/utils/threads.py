"""Work on large fields shared among threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

_MOST_THREADS = 16  # more do not read memory faster
_LEAST_CELLS = 1 << 17  # a thread for fewer is not worth its start
_pool: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_pool.clear)  # a forked process has none of its threads


def thread_map(work: Callable[[int], None], items: int, cells: int) -> None:
    """Call `work` with each number below `items`, in at most as many threads as torch computes in.

    Args:
        work: fills a place of its own, most of the time without the interpreter's lock; does not call this itself.
        items: how many.
        cells: how many an item goes through, once for each pass.
    """

    left = iter(range(items))  # each thread takes the next: one that shares its core with others takes fewer

    def several() -> None:
        try:
            for number in left:
                work(number)
        except BaseException:
            for _ in left:  # nobody begins another
                pass
            raise

    threads = min(torch.get_num_threads(), _MOST_THREADS, max(1, items * cells // _LEAST_CELLS))
    if threads > 1 and not _pool:
        _pool.append(ThreadPoolExecutor(_MOST_THREADS, "fields"))
    others = [_pool[0].submit(several) for _ in range(1, threads)]
    try:
        several()
    finally:
        wait(others)
    for other in others:
        other.result()
