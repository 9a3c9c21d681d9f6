"""Simulation of the other ranks of a run: this process is one rank of N, and gets N answers that differ by rank."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from credit.parallel import process_info
from credit.parallel.groups import object_tree
from credit.parallel.groups.object_tree import RankTree
from credit.parallel.process_info import ProcessInfo, fake_process_group

RANKS_PER_HOST = 8


@dataclass
class SimulatedRank:
    """One rank of a simulated run, and the counts of its messages and process groups.

    Attributes:
        world: number of ranks of the run.
        rank: this rank.
        recording: payloads that rank 0 broadcasts, in their order. Rank 0 fills the list, other ranks receive from it.
        messages: number of messages that this rank has sent or received.
        sent_bytes: bytes of the sent messages.
        received_bytes: bytes of the received messages.
        peers: ranks with which this rank has exchanged messages.
        group_calls: number of calls that create a process group.
        groups: description and number of ranks of each group that contains this rank.
        seconds: CPU time of the simulation of other ranks, which is not part of this rank's work.
    """

    world: int
    rank: int
    recording: list[bytes] = field(default_factory=list)
    messages: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    peers: set[int] = field(default_factory=set)
    group_calls: int = 0
    groups: list[tuple[str, int]] = field(default_factory=list)
    seconds: float = 0.0
    _num_replayed: int = 0
    _reduction: tuple[RankTree, Any, Callable[[Any, Any], Any]] | None = None

    @property
    def process_info(self) -> ProcessInfo:
        """Position of this rank, like the position that a launcher defines."""
        return ProcessInfo(self.rank, self.world, self.rank % RANKS_PER_HOST, "simulation")

    @contextmanager
    def run(self) -> Iterator[None]:
        """Context in which this process is the simulated rank: collectives return at once, with simulated answers."""
        with ExitStack() as stack:
            stack.enter_context(fake_process_group(self.world, self.rank))
            for owner in (dist, distributed_c10d, device_mesh):
                create_group = self._count_groups(owner.new_group)
                stack.enter_context(mock.patch.object(owner, "new_group", create_group))
            stack.enter_context(mock.patch.object(object_tree, "send_bytes", self._send))
            stack.enter_context(mock.patch.object(object_tree, "receive_bytes", self._receive))
            stack.enter_context(mock.patch.object(RankTree, "reduce", self._watch_reduce(RankTree.reduce)))
            stack.enter_context(
                mock.patch.object(RankTree, "broadcast_bytes", self._watch_broadcast(RankTree.broadcast_bytes))
            )
            stack.enter_context(mock.patch.object(process_info, "process_group", _yield_store))
            yield
        assert self.rank == 0 or self._num_replayed == len(self.recording), "rank 0 has made other collectives"

    def _count_groups(self, new_group: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of `new_group` that counts calls and creates groups without communication."""

        def create_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
            self.group_calls += 1
            members = range(self.world) if ranks is None else ranks
            if self.rank in members:
                description = options.get("group_desc") or options.get("backend") or "group"
                self.groups.append((description, len(members)))
            return new_group(ranks, **{**options, "backend": "fake"})

        return create_group

    def _send(self, payload: bytes, peer: int, group: dist.ProcessGroup | None) -> None:
        """Count a message instead of sending it."""
        self.messages += 1
        self.sent_bytes += len(payload)
        self.peers.add(peer)

    def _receive(self, peer: int, group: dist.ProcessGroup | None) -> bytes:
        """Return the message that another rank would send: the answers of its part of the tree, or a broadcast."""
        start = time.process_time()
        if self._reduction is not None:
            tree, value, combine = self._reduction
            index = tree.members.index(peer)
            last = min(2 * index - tree.index, len(tree.members))
            payload = pickle.dumps(_combine_answers(value, combine, tree.members[index:last]))
        else:
            payload = self.recording[self._num_replayed]
            self._num_replayed += 1
        self.seconds += time.process_time() - start
        self.messages += 1
        self.received_bytes += len(payload)
        self.peers.add(peer)
        return payload

    def _watch_reduce(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """Return `RankTree.reduce`, during which messages have the answers of other ranks."""

        def watched_reduce(tree: RankTree, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
            self._reduction = (tree, value, combine)
            try:
                return reduce(tree, value, combine)
            finally:
                self._reduction = None

        return watched_reduce

    def _watch_broadcast(self, broadcast: Callable[..., bytes]) -> Callable[..., bytes]:
        """Return `RankTree.broadcast_bytes`, which records what rank 0 broadcasts."""

        def watched_broadcast(tree: RankTree, payload: bytes | None) -> bytes:
            if self.rank == 0:
                self.recording.append(payload)
            return broadcast(tree, payload)

        return watched_broadcast


@contextmanager
def _yield_store(*_: Any) -> Iterator[dist.Store]:
    """Replacement of `process_info.process_group`, because the simulated process group already exists."""
    yield dist.HashStore()


def _combine_answers(value: Any, combine: Callable[[Any, Any], Any], ranks: Sequence[int]) -> Any:
    """Return the combination of the answers of several ranks to a collective in which this rank has `value`."""
    if len(ranks) == 1:
        return change_by_rank(value, ranks[0])
    middle = len(ranks) // 2
    return combine(_combine_answers(value, combine, ranks[:middle]), _combine_answers(value, combine, ranks[middle:]))


def change_by_rank(value: Any, rank: int) -> Any:
    """Return the answer of another rank: numbers and strings differ by rank, and None and booleans are equal."""
    if isinstance(value, str):
        return f"{value} (rank {rank})"
    if isinstance(value, float):
        return value + rank / 2**20
    if isinstance(value, bytes):
        return pickle.dumps(change_by_rank(pickle.loads(value), rank))
    if isinstance(value, list | tuple):
        return type(value)(change_by_rank(item, rank) for item in value)
    if isinstance(value, dict):
        return {change_by_rank(key, rank): change_by_rank(item, rank) for key, item in value.items()}
    if is_dataclass(value) and hasattr(value, "result"):
        return replace(value, result=change_by_rank(value.result, rank))
    return value
