"""Part of the scale model: `credit train` from its start to its first step, on the first and the last rank.

The code of the command runs unchanged, with a simulated process group, and ends before the first step.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.scale.meter import measure_usage
from benchmarks.scale.rows import Row
from benchmarks.scale.simulation import SimulatedRank
from benchmarks.scale.small_world import write_small_run
from credit.cli import train
from credit.config import Config
from credit.train.trainer import Trainer

# Events of the interpreter that are operations on a file system -> their names in the table.
_FILE_EVENTS = {"open": "opened", "os.mkdir": "created", "os.rename": "renamed", "os.listdir": "listed"}


class _FileCounter:
    """Counter of the operations on files below a folder.

    Attributes:
        counts: name of an operation -> number of calls.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._folder: str | None = None
        # An audit hook cannot be removed again.
        sys.addaudithook(self._count)

    def _count(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._folder is None or event not in _FILE_EVENTS:
            return
        path = str(arguments[0])
        # The heartbeat is rewritten as time passes, whatever the run does.
        if path.startswith(self._folder) and not path.endswith("heartbeat.json"):
            self.counts[_FILE_EVENTS[event]] += 1

    @contextmanager
    def watch(self, folder: Path) -> Iterator[None]:
        """Context in which operations on files below `folder` are counted from zero."""
        self.counts.clear()
        self._folder = str(folder)
        try:
            yield
        finally:
            self._folder = None


# Reason for which a message of the start grows.
_HOSTS = "names of all hosts, once, for the files that the ranks of a host share"


def measure(ranks: Sequence[int]) -> list[Row]:
    """Return rows with messages, bytes, groups, files, time and memory of the start of the first and the last rank."""
    rows = []
    files = _FileCounter()
    with tempfile.TemporaryDirectory() as folder:
        config = write_small_run(Path(folder), max(ranks))
        # The first start of a process imports modules and fills caches.
        _measure_start(config, SimulatedRank(min(ranks), 0), files)
        for world in ranks:
            first = SimulatedRank(world, 0)
            rows += _measure_start(config, first, files)
            rows += _measure_start(config, SimulatedRank(world, world - 1, recording=first.recording), files)
    return rows


def _measure_start(config: Config, simulation: SimulatedRank, files: _FileCounter) -> list[Row]:
    """Start a run on a simulated rank and return the rows of this rank."""
    stop_at_first_step = mock.patch.object(Trainer, "_train_with_rollbacks", lambda *_: "simulated")
    with simulation.run(), stop_at_first_step, files.watch(Path(config.save_loc)), measure_usage() as usage:
        train._train(config, simulation.process_info)
    world = simulation.world
    name = "rank 0" if simulation.rank == 0 else "last rank"
    rows = [
        Row(f"{name}: time", "s", world, usage.seconds - simulation.seconds),
        Row(f"{name}: memory", "MB", world, usage.megabytes),
        Row(f"{name}: messages of objects", "", world, simulation.messages),
        Row(f"{name}: received", "bytes", world, simulation.received_bytes, reason=_HOSTS),
        Row(f"{name}: sent", "bytes", world, simulation.sent_bytes),
        Row(f"{name}: connections for objects", "", world, len(simulation.peers)),
        Row(f"{name}: groups created", "", world, simulation.group_calls),
    ]
    for operation in _FILE_EVENTS.values():
        rows.append(Row(f"{name}: files or folders {operation}", "", world, files.counts[operation]))
    return rows
