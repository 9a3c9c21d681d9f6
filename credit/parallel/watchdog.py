"""Watchdog that reports which ranks a run waits for, long before its collectives time out.

A rank that is stopped, stuck or dead makes all others wait in a collective. The error at the time-out then appears on
the waiting ranks and does not name the missing rank. So each rank writes its progress every few seconds to the
key-value store of the run, which all ranks can read. A rank without progress logs where in its code it waits. Rank 0
also compares the ranks. It logs the ranks that are behind, and the last collective of each process group, which it
takes from torch's flight recorder where the backend has one.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

# Number of innermost calls of a stack trace that a report shows.
_MAX_STACK_ENTRIES = 12
# Number of ranks that a line of a report names.
_MAX_LISTED_RANKS = 16


class Watchdog:
    """Context manager with a thread that watches the progress of all ranks.

    Args:
        store: key-value store of the run's process group; None for a single process, which is not watched.
        rank: rank of this process, from 0.
        world: number of ranks.
        patience: seconds without progress after which a rank logs a report, one for each halt.
        beat: seconds between two entries of a rank in the store.
    """

    def __init__(self, store: dist.Store | None, rank: int, world: int, patience: float, beat: float = 10.0) -> None:
        # The connection of the training may be held by a call that waits, so the thread has one of its own.
        self._store = None if store is None else store.clone()
        self._rank = rank
        self._world = world
        self._patience = patience
        self._beat = beat
        self._activity_count = 0
        self._activity = "starting"
        self._main_thread = threading.main_thread().ident
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def record_activity(self, activity: str) -> None:
        """Record that this rank begins an activity, which counts as progress; reports show the text `activity`."""
        self._activity_count += 1
        self._activity = activity

    def __enter__(self) -> Watchdog:
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        """Run in the thread: write the status of this rank to the store at every beat, and report each halt once."""
        beats = 0
        last_count = -1
        last_progress = time.monotonic()
        is_reported = False
        # One pass for each beat, until the context ends.
        while not self._is_stopping.wait(self._beat):
            is_halted = self._activity_count == last_count
            if not is_halted:
                last_count = self._activity_count
                last_progress = time.monotonic()
                is_reported = False
            beats += 1
            # Reading the flight recorder costs time, so it is read during a halt only.
            collectives = read_last_collectives() if is_halted else {}
            try:
                self._store.set(_store_key(self._rank), json.dumps(self._describe_status(beats, collectives)))
                seconds_waited = time.monotonic() - last_progress
                if is_halted and not is_reported and seconds_waited > self._patience:
                    is_reported = True
                    self._report(seconds_waited)
            # Without a store nothing can be compared, so the thread ends; the training goes on.
            except (RuntimeError, dist.DistError) as error:
                logger.error("rank %d has lost the run's store: %s", self._rank, error)
                return

    def _report(self, seconds_waited: float) -> None:
        """Log where in its code this rank waits, and on rank 0 also the ranks that it waits for.

        Args:
            seconds_waited: seconds since the last progress.
        """
        lines = [f"rank {self._rank} has made no progress for {seconds_waited:.0f} s ({self._activity})"]
        if self._rank == 0:
            before = self._read_statuses()
            # Every rank that lives writes its status at least once in this time.
            self._is_stopping.wait(1.5 * self._beat)
            # No entry in the store has beat -1, so this rank does not count as silent.
            rank0_status = self._describe_status(-1, read_last_collectives())
            now = self._read_statuses()
            # The status of this rank in the store is as old as its last beat.
            now[0] = rank0_status
            lines += describe_lag(before, now)
        frame = sys._current_frames().get(self._main_thread)
        if frame is not None:
            lines.append("it waits here (most recent call last):")
            stack_entries = traceback.format_stack(frame)[-_MAX_STACK_ENTRIES:]
            lines += "".join(stack_entries).rstrip().splitlines()
        logger.error("%s", "\n".join(lines))

    def _describe_status(self, beats: int, collectives: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
        """Return the status of this rank, as it is written to the store and read by `describe_lag`.

        Args:
            beats: number of entries written so far; a growing number shows that the thread lives.
            collectives: last collective of each process group, from `read_last_collectives`.
        """
        return {"beats": beats, "count": self._activity_count, "activity": self._activity, "collectives": collectives}

    def _read_statuses(self) -> dict[int, dict[str, Any] | None]:
        """Return the last status of each rank by rank; None for a rank that has written none."""
        statuses = {}
        for rank in range(self._world):
            key = _store_key(rank)
            # `get` would wait for a key that is not there.
            if self._store.check([key]):
                statuses[rank] = json.loads(self._store.get(key))
            else:
                statuses[rank] = None
        return statuses


def describe_lag(
    before: Mapping[int, Mapping[str, Any] | None], now: Mapping[int, Mapping[str, Any] | None]
) -> list[str]:
    """Return lines of text that say which ranks are silent or behind, from the statuses of all ranks at two moments.

    Args:
        before: last status of each rank by rank; None for a rank that has written none. A status is a dict with
            ``beats`` (number of entries written so far), ``count`` (number of activities begun), ``activity`` (the last
            one) and ``collectives`` (from `read_last_collectives`).
        now: the same, read more than one beat later.
    """
    lines = []

    # A rank that lives writes a new number of beats.
    silent_ranks = [rank for rank, status in now.items() if status is None or status == before[rank]]
    if silent_ranks:
        lines.append(f"silent, so stopped or dead: {_list_ranks(silent_ranks)}")

    # Ranks that live but have begun fewer activities than the others.
    counts = {rank: status["count"] for rank, status in now.items() if status is not None}
    highest_count = max(counts.values(), default=0)
    for rank, count in counts.items():
        if count < highest_count and rank not in silent_ranks:
            lines.append(f"behind: rank {rank} ({now[rank]['activity']})")

    # The ranks that have begun a group's last collective wait for those that have not.
    # For each group and each of its ranks: (number, name) of the last collective that the rank has begun.
    collectives: dict[str, dict[int, tuple[int, str]]] = {}
    for rank, status in now.items():
        if status is not None:
            for group, collective in status["collectives"].items():
                collectives.setdefault(group, {})[rank] = collective
    for group, collective_by_rank in collectives.items():
        highest_number = max(number for number, _ in collective_by_rank.values())
        waiting_ranks = [rank for rank, (number, _) in collective_by_rank.items() if number == highest_number]
        # All ranks belong to the default group, also those that had no time to write their status.
        group_ranks = now if "default_pg" in group else collective_by_rank
        missing_ranks = [rank for rank in group_ranks if rank not in waiting_ranks]
        _, name = collective_by_rank[waiting_ranks[0]]
        line = f"group {group}: {_list_ranks(waiting_ranks)} in {name}, number {highest_number}"
        if missing_ranks:
            line += f"; not there yet: {_list_ranks(missing_ranks)}"
        lines.append(line)
    return lines


def read_last_collectives() -> dict[str, tuple[int, str]]:
    """Return by process group the last collective that this rank has begun, as (number in the group, name).

    The collectives are read from torch's flight recorder. The result is empty where the backend or the version of torch
    has no flight recorder.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return {}
    try:
        entries = json.loads(dump()).get("entries", [])
    except (RuntimeError, ValueError):
        return {}
    last: dict[str, tuple[int, str]] = {}
    for entry in entries:
        # Entries have a group's name and description, which may be equal. The dict drops a repetition.
        group = " ".join(dict.fromkeys(entry["process_group"]))
        number = entry["collective_seq_id"]
        last_number, _ = last.get(group, (0, ""))
        if number >= last_number:
            last[group] = (number, entry["profiling_name"])
    return last


def _store_key(rank: int) -> str:
    """Return the key under which a rank writes its status to the store."""
    return f"watchdog/{rank}"


def _list_ranks(ranks: list[int]) -> str:
    """Return ranks as text such as ``rank 3`` or ``ranks 0, 1 and 7 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    text = "ranks " + ", ".join(str(rank) for rank in ranks[:_MAX_LISTED_RANKS])
    if len(ranks) > _MAX_LISTED_RANKS:
        text += f" and {len(ranks) - _MAX_LISTED_RANKS} more"
    return text
