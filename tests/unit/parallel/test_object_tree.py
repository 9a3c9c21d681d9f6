"""A binomial tree of ranks: combinations in the order of ranks, broadcasts to all, and few messages."""

from __future__ import annotations

import copyreg
import operator
import pickle
import queue
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from credit.errors import DataError
from credit.parallel.groups import object_tree
from credit.parallel.groups.object_tree import RankTree
from credit.parallel.object_collectives import _capture_outcome


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8, 13])
def test_values_of_all_members_in_their_order(num_ranks: int) -> None:
    """Each rank is a thread, and its messages go through queues."""
    mailboxes: dict[tuple[int, int], queue.Queue] = defaultdict(queue.Queue)
    num_messages: Counter[int] = Counter()
    # Neighbouring ranks of a larger run.
    members = range(100, 100 + num_ranks)

    class ThreadTree(RankTree):
        def _send(self, payload: bytes, index: int) -> None:
            num_messages[self.index] += 1
            mailboxes[self.members[self.index], self.members[index]].put(payload)

        def _receive(self, index: int) -> bytes:
            num_messages[self.index] += 1
            return mailboxes[self.members[index], self.members[self.index]].get(timeout=20)

    def run(index: int) -> tuple[list[int], list[int]]:
        tree = ThreadTree(None, members, index)
        combined = tree.reduce([index], operator.add)
        return combined, tree.broadcast_object(combined)

    with ThreadPoolExecutor(num_ranks) as pool:
        results = list(pool.map(run, range(num_ranks)))
    everyone = list(range(num_ranks))
    assert results[0][0] == everyone
    assert [shared for _, shared in results] == [everyone] * num_ranks
    # Two messages to and from each peer, of which there are log2(N) at most.
    assert max(num_messages.values(), default=0) <= 2 * (num_ranks - 1).bit_length()


def test_messages_are_sizes_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(object_tree, "has_host_backend", lambda _: True)
    monkeypatch.setattr(object_tree.dist, "send", lambda tensor, group, group_dst: sent.append((tensor, group_dst)))
    object_tree.send_bytes(b"abc", 5, None)
    assert [(tensor.tolist(), peer) for tensor, peer in sent] == [([3], 5), ([97, 98, 99], 5)]
    messages = [tensor for tensor, _ in sent]
    monkeypatch.setattr(object_tree.dist, "recv", lambda tensor, **_: tensor.copy_(messages.pop(0)))
    assert object_tree.receive_bytes(5, None) == b"abc"


def _reduce_with_cause(error: Exception) -> tuple:
    """Reduce an error with its cause, as some libraries make pickle do it."""
    return type(error), error.args, {"__cause__": error.__cause__}


@pytest.mark.parametrize("pickles_causes", [False, True])
def test_an_error_that_cannot_be_unpickled_keeps_its_kind(
    pickles_causes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pickle finds no class that is defined inside a function.
    class OverlapError(DataError):
        def __init__(self, name: str, location: str) -> None:
            super().__init__(f"{name} is in {location}")

    def fail() -> None:
        raise OverlapError("t2m", "two sources")

    if pickles_causes:
        monkeypatch.setitem(copyreg.dispatch_table, DataError, _reduce_with_cause)
    else:
        monkeypatch.delitem(copyreg.dispatch_table, DataError, raising=False)
    outcome = _capture_outcome(fail)
    assert type(outcome.error) is DataError and str(outcome.error) == "t2m is in two sources"
    assert type(outcome.error.__cause__) is OverlapError
    received_error = pickle.loads(pickle.dumps(outcome)).error
    assert type(received_error) is DataError and str(received_error) == str(outcome.error)
