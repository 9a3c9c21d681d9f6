"""Watchdog that reports the ranks for which a run waits, long before the collectives time out.

If a rank is stopped, stuck or dead, all other ranks wait in a collective. The timeout error then appears on the waiting
ranks and does not name the missing rank. Each rank therefore writes its progress every few seconds to the key-value
store of the run, which all ranks can read. When a run halts, rank 0 compares the ranks. It logs the ranks that are
behind, the lines of code where ranks wait, and the last collective of each process group. The collectives come from
torch's flight recorder, if the backend has this recorder. The first few ranks that wait at a line also log their whole
stack, each to a separate file.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

# Maximum number of innermost calls of a stack trace in a report.
_MAX_STACK_ENTRIES = 12
# Maximum number of ranks in a line of a report.
_MAX_LISTED_RANKS = 16
# Maximum number of lines of code in a report, and of ranks at each line that log their stack.
_MAX_CODE_LINES = 4
_MAX_STACKS = 4
# Maximum number of ranks that write their error into STATUS. The first errors show the cause; later errors only show
# that the connection to the failed ranks was lost.
_MAX_FAILURE_REPORTS = 8
# Maximum number of entries that all ranks together write to the store per second. With more ranks, each rank writes
# less often.
_MAX_ENTRIES_PER_SECOND = 200
# Number of entries that rank 0 reads from the store with one call.
_NUM_ENTRIES_READ = 1024


class Watchdog:
    """Context manager with a thread that watches the progress of all ranks.

    Args:
        store: key-value store of the run's process group; None for a single process, which is not watched.
        rank: rank of this process, from 0.
        world: number of ranks.
        patience: seconds without progress after which a rank logs a report; a rank logs one report for each halt.
        beat: minimum time in seconds between two entries that a rank writes to the store.
    """

    def __init__(self, store: dist.Store | None, rank: int, world: int, patience: float, beat: float = 10.0) -> None:
        # A waiting call of the main thread may occupy its connection to the store, so this thread has a separate one.
        self._store = None if store is None else store.clone()
        self._rank = rank
        self._world = world
        self._patience = patience
        self._beat = max(beat, world / _MAX_ENTRIES_PER_SECOND)
        self._activity_count = 0
        self._activity = "starting"
        self._main_thread = threading.main_thread().ident
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def record_activity(self, activity: str) -> None:
        """Record that this rank begins an activity; each call is progress of the rank.

        Args:
            activity: description of the activity for reports.
        """
        self._activity_count += 1
        self._activity = activity

    def is_among_first(self, event: str, count: int) -> bool:
        """Return True for the first `count` ranks that call this method for `event`.

        With this method, only some of thousands of ranks report the same event. The store is lost if the host of rank 0
        fails. Without a store, the method returns True on about `count` evenly spaced ranks.
        """
        if self._store is not None:
            with suppress(RuntimeError):
                return self._store.add(f"watchdog/first/{event}", 1) <= count
        return self._rank % max(1, self._world // count) == 0

    def may_report_failure(self) -> bool:
        """Return True if this rank may write the error that ends it into STATUS.

        If thousands of ranks fail together, only some of them may write to this file.
        """
        return self.is_among_first("failure", _MAX_FAILURE_REPORTS) or self._rank == 0

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
        # The loop runs once per beat, until the context ends.
        while not self._is_stopping.wait(self._beat):
            is_halted = self._activity_count == last_count
            if not is_halted:
                last_count = self._activity_count
                last_progress = time.monotonic()
                is_reported = False
            beats += 1
            try:
                self._store.set(_store_key(self._rank), json.dumps(self._describe_status(beats, is_halted)))
                seconds_waited = time.monotonic() - last_progress
                if is_halted and not is_reported and seconds_waited > self._patience:
                    is_reported = True
                    self._report(seconds_waited)
            # Without a store the ranks cannot be compared, so the thread ends; the training run continues.
            except (RuntimeError, dist.DistError) as error:
                logger.error("rank %d has lost the connection to the run's store: %s", self._rank, error)
                return

    def _report(self, seconds_waited: float) -> None:
        """Log the line of code where this rank waits; on rank 0, also log the ranks for which the run waits.

        Args:
            seconds_waited: seconds since the last progress.
        """
        code_line = self._find_code_line()
        if self._rank > 0 and not self.is_among_first(f"{self._activity} {code_line}", _MAX_STACKS):
            return
        lines = [f"rank {self._rank} has made no progress for {seconds_waited:.0f} s ({self._activity})"]
        if self._rank == 0:
            before = self._read_statuses()
            # Every live rank writes its status at least once in this time.
            self._is_stopping.wait(1.5 * self._beat)
            # No entry in the store has beat -1, so rank 0 is not reported as silent.
            rank0_status = self._describe_status(-1, is_halted=True)
            now = self._read_statuses()
            # Replace the status of rank 0 from the store, which is from its last beat.
            now[0] = rank0_status
            lines += describe_lag(before, now)
        frame = sys._current_frames().get(self._main_thread)
        if frame is not None:
            lines.append("this rank waits here (most recent call last):")
            stack_entries = traceback.format_stack(frame)[-_MAX_STACK_ENTRIES:]
            lines += "".join(stack_entries).rstrip().splitlines()
        # The output of the job shows errors of all ranks. Ranks other than 0 log a warning, which only their log file
        # shows.
        logger.log(logging.ERROR if self._rank == 0 else logging.WARNING, "%s", "\n".join(lines))

    def _describe_status(self, beats: int, is_halted: bool) -> dict[str, Any]:
        """Return the status of this rank in the format of the store, which `describe_lag` reads.

        Args:
            beats: number of entries written so far; a growing number shows that the thread is alive.
            is_halted: True if there was no progress since the last entry. The status then includes the line of code and
                the last collective of each process group. They are otherwise omitted, because reading them takes time.
        """
        return {
            "beats": beats,
            "count": self._activity_count,
            "activity": self._activity,
            "code_line": self._find_code_line() if is_halted else None,
            "collectives": read_last_collectives() if is_halted else {},
        }

    def _find_code_line(self) -> str:
        """Return the innermost line of code outside of torch that the main thread is executing."""
        frame = sys._current_frames().get(self._main_thread)
        for entry in reversed(traceback.extract_stack(frame)):
            path = Path(entry.filename)
            if "torch" not in path.parts:
                return f"{path.parent.name}/{path.name}:{entry.lineno} in {entry.name}"
        return "unknown"

    def _read_statuses(self) -> dict[int, dict[str, Any] | None]:
        """Return rank -> its last status in the store; None for a rank without a status."""
        statuses: dict[int, dict[str, Any] | None] = {}
        for first in range(0, self._world, _NUM_ENTRIES_READ):
            self._read_statuses_of(range(first, min(first + _NUM_ENTRIES_READ, self._world)), statuses)
        return statuses

    def _read_statuses_of(self, ranks: range, statuses: dict[int, dict[str, Any] | None]) -> None:
        """Read the last statuses of a range of ranks from the store, and add them to `statuses`."""
        keys = [_store_key(rank) for rank in ranks]
        # `multi_get` would wait for missing keys.
        if self._store.check(keys):
            for rank, text in zip(ranks, self._store.multi_get(keys), strict=True):
                statuses[rank] = json.loads(text)
        elif len(ranks) == 1:
            statuses[ranks[0]] = None
        else:
            middle = len(ranks) // 2
            self._read_statuses_of(ranks[:middle], statuses)
            self._read_statuses_of(ranks[middle:], statuses)


def describe_lag(
    before: Mapping[int, Mapping[str, Any] | None], now: Mapping[int, Mapping[str, Any] | None]
) -> list[str]:
    """Compare the statuses of all ranks at two times, and return a report of silent ranks and ranks that are behind.

    Args:
        before: rank -> its last status; None for a rank without a status. A status is a dict with ``beats`` (number of
            entries written so far), ``count`` (number of activities begun), ``activity`` (the last activity),
            ``code_line`` (line of code where the rank waits; None if it has not halted) and ``collectives`` (from
            `read_last_collectives`).
        now: statuses in the same format, read more than one beat later.

    Returns:
        The lines of the report.
    """
    lines = []

    # A live rank writes a new number of beats.
    silent_ranks = {rank: None for rank, status in now.items() if status is None or status == before[rank]}
    if silent_ranks:
        lines.append(f"silent, so stopped or dead: {_list_ranks(list(silent_ranks))}")

    # Live ranks that have begun fewer activities than other ranks are behind.
    counts = {rank: status["count"] for rank, status in now.items() if status is not None}
    highest_count = max(counts.values(), default=0)
    behind_ranks = [rank for rank, count in counts.items() if count < highest_count and rank not in silent_ranks]
    for rank in behind_ranks[:_MAX_LISTED_RANKS]:
        lines.append(f"behind: rank {rank} ({now[rank]['activity']})")
    if len(behind_ranks) > _MAX_LISTED_RANKS:
        lines.append(f"behind: {len(behind_ranks) - _MAX_LISTED_RANKS} more ranks")

    # Most ranks wait at the same line of code, so the lines with few ranks are the most informative.
    ranks_of_code_line: dict[str, list[int]] = {}
    for rank, status in now.items():
        if status is not None and status["code_line"] is not None and rank not in silent_ranks:
            ranks_of_code_line.setdefault(status["code_line"], []).append(rank)
    for code_line, ranks in sorted(ranks_of_code_line.items(), key=lambda item: len(item[1]))[:_MAX_CODE_LINES]:
        lines.append(f"at {code_line}: {_list_ranks(ranks)}")

    # Ranks that have begun a group's last collective wait for the ranks that have not begun it.
    # group -> rank -> (number, name) of the last collective that the rank has begun.
    collectives: dict[str, dict[int, tuple[int, str]]] = {}
    for rank, status in now.items():
        if status is not None:
            for group, collective in status["collectives"].items():
                collectives.setdefault(group, {})[rank] = collective
    for group, collective_by_rank in collectives.items():
        highest_number = max(number for number, _ in collective_by_rank.values())
        waiting_ranks = [rank for rank, (number, _) in collective_by_rank.items() if number == highest_number]
        # All ranks belong to the default group, even if they have not written a status.
        group_ranks = now if "default_pg" in group else collective_by_rank
        missing_ranks = sorted(set(group_ranks).difference(waiting_ranks))
        _, name = collective_by_rank[waiting_ranks[0]]
        line = f"group {group}: {_list_ranks(waiting_ranks)} in {name}, number {highest_number}"
        if missing_ranks:
            line += f"; missing: {_list_ranks(missing_ranks)}"
        lines.append(line)
    return lines


def read_last_collectives() -> dict[str, tuple[int, str]]:
    """Return process group -> the last collective that this rank has begun, as (number in the group, name).

    The collectives are read from torch's flight recorder. The result is empty if the backend or the version of torch
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
        # An entry has the name and the description of its group, which may be equal. The dict removes a repetition.
        group = " ".join(dict.fromkeys(entry["process_group"]))
        number = entry["collective_seq_id"]
        last_number, _ = last.get(group, (0, ""))
        if number >= last_number:
            last[group] = (number, entry["profiling_name"])
    return last


def _store_key(rank: int) -> str:
    """Return the key of a rank's status in the store."""
    return f"watchdog/{rank}"


def _list_ranks(ranks: list[int]) -> str:
    """Return a string such as ``rank 3`` or ``ranks 0, 1 and 7 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    text = "ranks " + ", ".join(str(rank) for rank in ranks[:_MAX_LISTED_RANKS])
    if len(ranks) > _MAX_LISTED_RANKS:
        text += f" and {len(ranks) - _MAX_LISTED_RANKS} more"
    return text
