"""Names the ranks that a run waits for, long before its collectives give up.

A rank that is stopped, stuck or dead makes all others wait in a collective, and the error that comes at last says that
time is up, on the wrong ranks. So each rank tells the run's store every few seconds how far it is. One that makes no
progress logs where in its code it waits; rank 0 also compares, and logs who is behind and the last collective of each
group (from torch's flight recorder, where the version has one for the backend).
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

_STACK_LINES = 12


class Watchdog:
    """Watches over the progress of all ranks from a thread of its own; a context manager.

    Args:
        store: of the run's process group, None where there is one process and nothing to watch.
        rank: of this process.
        world: number of ranks.
        patience: seconds without progress after which a rank speaks up; once for each time that it comes to a halt.
        beat: seconds between signs of life.
    """

    def __init__(self, store: dist.Store | None, rank: int, world: int, patience: float, beat: float = 10.0) -> None:
        # a connection of its own: the training's may be held by a call that waits
        self._store = None if store is None else store.clone()
        self._rank, self._world = rank, world
        self._patience, self._beat = patience, beat
        self._count, self._what = 0, "starting"
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def note(self, what: str) -> None:
        """Say what this rank begins to do; that is progress."""
        self._count += 1
        self._what = what

    def __enter__(self) -> Watchdog:
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        beats, seen, since, told = 0, -1, time.monotonic(), False
        while not self._over.wait(self._beat):
            halted = self._count == seen
            if not halted:
                seen, since, told = self._count, time.monotonic(), False
            beats += 1
            try:
                # reading the recorder costs something, so only where nothing moves
                self._store.set(_key(self._rank), json.dumps(self._said(beats, last_collectives() if halted else {})))
                waited = time.monotonic() - since
                if halted and not told and waited > self._patience:
                    told = True
                    self._report(waited)
            except (RuntimeError, dist.DistError) as error:
                logger.error("rank %d has lost the run's store: %s", self._rank, error)
                return

    def _report(self, waited: float) -> None:
        lines = [f"rank {self._rank} has made no progress for {waited:.0f} s ({self._what})"]
        if self._rank == 0:
            before = self._others()
            # long enough for every rank that lives to beat
            self._over.wait(1.5 * self._beat)
            lines += describe_lag(before, {**self._others(), 0: self._said(beats=-1)})
        frame = sys._current_frames().get(self._main)
        if frame is not None:
            lines.append("it waits here (most recent call last):")
            lines += "".join(traceback.format_stack(frame)[-_STACK_LINES:]).rstrip().splitlines()
        logger.error("%s", "\n".join(lines))

    def _said(self, beats: int, collectives: Mapping[str, tuple[int, str]] | None = None) -> dict[str, Any]:
        collectives = last_collectives() if collectives is None else collectives
        return {"beats": beats, "count": self._count, "what": self._what, "collectives": collectives}

    def _others(self) -> dict[int, dict[str, Any] | None]:
        """Return what each rank has said last, None of one that has said nothing."""
        keys = {rank: _key(rank) for rank in range(self._world)}
        return {
            rank: json.loads(self._store.get(key)) if self._store.check([key]) else None for rank, key in keys.items()
        }


def describe_lag(
    before: Mapping[int, Mapping[str, Any] | None], now: Mapping[int, Mapping[str, Any] | None]
) -> list[str]:
    """Return in words which ranks are silent or behind, from what all ranks have said at two moments.

    Args:
        before: rank -> what it said last, None for nothing.
        now: the same, more than a beat later.
    """
    lines = []
    silent = [rank for rank, said in now.items() if said is None or said == before[rank]]
    if silent:
        lines.append(f"silent, so stopped or dead: {_ranks(silent)}")
    counts = {rank: said["count"] for rank, said in now.items() if said is not None}
    furthest = max(counts.values(), default=0)
    for rank, count in counts.items():
        if count < furthest and rank not in silent:
            lines.append(f"behind: rank {rank} ({now[rank]['what']})")
    # group -> rank -> (number, name) of the last collective that it has begun
    groups: dict[str, dict[int, list]] = {}
    for rank, said in now.items():
        for group, last in (said or {}).get("collectives", {}).items():
            groups.setdefault(group, {})[rank] = last
    for group, ranks in groups.items():
        most = max(number for number, _ in ranks.values())
        waiting = [rank for rank, (number, _) in ranks.items() if number == most]
        # all ranks belong to the default group, also those that had no time to say so
        members = now if "default_pg" in group else ranks
        missing = [rank for rank in members if rank not in waiting]
        name = ranks[waiting[0]][1]
        lines.append(
            f"group {group}: {_ranks(waiting)} in {name}, number {most}"
            + (f"; not there yet: {_ranks(missing)}" if missing else "")
        )
    return lines


def last_collectives() -> dict[str, tuple[int, str]]:
    """Return number and name of the last collective of each group that this rank has begun, empty where unknown."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return {}
    try:
        entries = json.loads(dump()).get("entries", [])
    except (RuntimeError, ValueError):
        return {}
    last: dict[str, tuple[int, str]] = {}
    for entry in entries:
        group = " ".join(dict.fromkeys(entry["process_group"]))
        if entry["collective_seq_id"] >= last.get(group, (0, ""))[0]:
            last[group] = entry["collective_seq_id"], entry["profiling_name"]
    return last


def _key(rank: int) -> str:
    return f"watchdog/{rank}"


def _ranks(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 1 and 7 more``."""
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
