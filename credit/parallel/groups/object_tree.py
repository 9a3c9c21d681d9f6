"""Exchange of Python objects between ranks along a binomial tree.

Rank 0 receives from the ranks 1, 2, 4, 8 and so on, rank 4 from the ranks 5 and 6, and each rank but 0 sends to one. So
of N ranks none talks to more than log2(N) others. torch's object collectives would pad all objects to the largest, and
send each rank all N. Neighbouring ranks are on the same host, so the lower half of the tree needs no network.

Messages are point-to-point. gloo connects two ranks when they first talk to each other (see
`credit.parallel.process_info`), so a tree needs few connections as well.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class RankTree:
    """Position of this process in a binomial tree of ranks.

    Attributes:
        group: process group that carries the messages; None for that of all ranks.
        members: ranks in `group` that take part, in their order; the first is the root.
        index: index of this process in `members`.
    """

    group: dist.ProcessGroup | None
    members: Sequence[int]
    index: int

    @classmethod
    def of_ranks(cls, ranks: dist.ProcessGroup | range | None = None) -> RankTree:
        """Return the tree of the ranks of a process group, of neighbouring ranks of the run, or (None) of all ranks."""
        if isinstance(ranks, range):
            return cls(None, ranks, ranks.index(dist.get_rank()))
        group = ranks
        index = dist.get_rank(group)
        if has_host_backend(group) or not has_host_backend(None):
            return cls(group, range(dist.get_world_size(group)), index)
        # The group communicates between GPUs only, so its objects go through the group of all ranks.
        return cls(None, dist.get_process_group_ranks(group), index)

    def reduce(self, value: T, combine: Callable[[T, T], T]) -> T:
        """Collective: combine the values of all members, in their order, on the root.

        Args:
            value: value of this process, which can be pickled.
            combine: associative function of two values. The members of its first argument come before those of its
                second one.

        Returns:
            On the root the combination of all values, on other members that of a part of them.
        """
        step = 1
        while step < len(self.members):
            if self.index & step:
                self._send(pickle.dumps(value), self.index - step)
                break
            if self.index + step < len(self.members):
                value = combine(value, pickle.loads(self._receive(self.index + step)))
            step *= 2
        return value

    def broadcast(self, payload: bytes | None) -> bytes:
        """Collective: return the bytes of the root on every member; `payload` of other members is not read."""
        # The lowest bit of the index is the distance to the sender. The root has none, and sends in all steps.
        step = self.index & -self.index
        if self.index > 0:
            payload = self._receive(self.index - step)
        else:
            step = 1 << (len(self.members) - 1).bit_length()
        # The farthest member comes first, because most members wait behind it.
        step //= 2
        while step:
            if self.index + step < len(self.members):
                self._send(payload, self.index + step)
            step //= 2
        return payload

    def share(self, value: T) -> T:
        """Collective: return the root's value on every member; the values of other members are not read."""
        is_root = self.index == 0
        payload = self.broadcast(pickle.dumps(value) if is_root else None)
        return value if is_root else pickle.loads(payload)

    def _send(self, payload: bytes, index: int) -> None:
        """Send bytes to the member of an index, which must call `_receive`."""
        send_bytes(payload, self.members[index], self.group)

    def _receive(self, index: int) -> bytes:
        """Return the bytes that the member of an index sends."""
        return receive_bytes(self.members[index], self.group)


def has_host_backend(group: dist.ProcessGroup | None) -> bool:
    """Return True if a process group (None for that of all ranks) can communicate tensors in host memory."""
    return "cpu:" in dist.get_backend_config(group)


def send_bytes(payload: bytes, peer: int, group: dist.ProcessGroup | None) -> None:
    """Send bytes to the rank `peer` of a process group: their number, then the bytes."""
    device = _message_device(group)
    dist.send(torch.tensor([len(payload)], device=device), group=group, group_dst=peer)
    # A bytearray, because torch warns of memory that it must not write.
    dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device), group=group, group_dst=peer)


def receive_bytes(peer: int, group: dist.ProcessGroup | None) -> bytes:
    """Return the bytes that the rank `peer` of a process group sends by `send_bytes`."""
    device = _message_device(group)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, group=group, group_src=peer)
    payload = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.recv(payload, group=group, group_src=peer)
    return payload.cpu().numpy().tobytes()


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of the messages: the host, or the GPU if the group communicates between GPUs only."""
    if has_host_backend(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
