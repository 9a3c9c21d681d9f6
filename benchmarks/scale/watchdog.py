"""Part of the scale model: the watchdog of a run that has halted, of which one rank is silent and one behind."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from unittest import mock

import torch.distributed as dist

from benchmarks.scale.meter import Usage, measure_usage
from benchmarks.scale.rows import Row
from credit.parallel import watchdog
from credit.parallel.watchdog import Watchdog

_COLLECTIVES = {f"{number} mesh": (1000, "nccl:_all_gather_base") for number in range(8)}


def measure(ranks: Sequence[int]) -> list[Row]:
    """Return rows with the load of the store, and the time, memory and output of rank 0's report."""
    rows = []
    for world in ranks:
        store = dist.TCPStore("localhost", 0, 1, is_master=True)
        for rank in range(1, world - 1):
            _write_status(store, world, rank, beats=1)
        watched = Watchdog(store, 0, world, patience=0.0)
        watched.record_activity("step 1000")
        text, usage = _report(watched, store, world)
        num_stacks = _count_stacks(store, world)
        reason = "during a halt rank 0 reads the status of each rank"
        most_entries = f"at most {watchdog._MAX_ENTRIES_PER_SECOND}"
        rows.append(Row("entries in the store in a second, all ranks", "", world, world / watched._beat, most_entries))
        rows.append(Row("seconds between the entries of a rank", "s", world, watched._beat, "bounds the entries"))
        rows.append(Row("report of rank 0: time", "s", world, usage.seconds, reason))
        rows.append(Row("report of rank 0: memory", "MB", world, usage.megabytes, reason))
        rows.append(Row("report of rank 0: lines", "", world, len(text.splitlines())))
        rows.append(Row("ranks that log a stack", "", world, num_stacks))
    return rows


def _write_status(store: dist.Store, world: int, rank: int, beats: int) -> None:
    """Write the status of a waiting rank; the second-last rank has begun fewer steps, and the last has no status."""
    is_behind = rank == world - 2
    status = {
        "beats": beats,
        "count": 999 if is_behind else 1000,
        "activity": "step 999" if is_behind else "step 1000",
        "code_line": "samples/loader.py:80 in read" if is_behind else "train/step.py:120 in __call__",
        "collectives": _COLLECTIVES,
    }
    store.set(watchdog._store_key(rank), json.dumps(status))


def _report(watched: Watchdog, store: dist.Store, world: int) -> tuple[str, Usage]:
    """Return the report of rank 0 and its usage, while the other ranks continue to write their status."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    # Time does not pass while rank 0 waits for new entries.
    seconds_of_others = 0.0

    def write_statuses(_: float) -> bool:
        nonlocal seconds_of_others
        start = time.process_time()
        for rank in range(1, world - 1):
            _write_status(store, world, rank, beats=2)
        seconds_of_others = time.process_time() - start
        return False

    disabled_level = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    watchdog.logger.addHandler(handler)
    watchdog.logger.propagate = False
    try:
        with mock.patch.object(watched, "_is_stopping") as stopping, measure_usage() as usage:
            stopping.wait = write_statuses
            watched._report(600.0)
    finally:
        watchdog.logger.removeHandler(handler)
        watchdog.logger.propagate = True
        logging.disable(disabled_level)
    usage.seconds -= seconds_of_others
    return "\n".join(messages), usage


def _count_stacks(store: dist.Store, world: int) -> int:
    """Return the number of ranks that may log their stack, if all ranks wait at the same line of code."""
    asking = Watchdog(store, 1, world, patience=0.0)
    return sum(asking.is_among_first("step 1000 train/step.py:120", watchdog._MAX_STACKS) for _ in range(world))
