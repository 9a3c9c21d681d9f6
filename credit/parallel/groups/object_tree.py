"""Exchange of Python objects between ranks along a binomial tree.

Rank 0 receives from the ranks 1, 2, 4, 8 and so on, and rank 4 receives from the ranks 5 and 6. Each rank except 0
sends to one rank. With N ranks, a rank therefore communicates with at most log2(N) ranks (rounded up). In contrast,
torch's object collectives pad all objects to the size of the largest, and send all N objects to each rank. Most
messages of the tree are between neighbouring ranks. These are on the same host, so their messages need no network.

Messages are point-to-point. gloo connects two ranks at their first message (see `credit.parallel.process_info`), so a
tree also needs few connections.
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
        group: process group through which the messages are sent; None for the group of all ranks.
        members: ranks in `group` that take part, in ascending order; the first member is the root of the tree.
        index: index of this process in `members`.
    """

    group: dist.ProcessGroup | None
    members: Sequence[int]
    index: int

    @classmethod
    def of_ranks(cls, ranks: dist.ProcessGroup | range | None = None) -> RankTree:
        """Build a tree of some ranks.

        Args:
            ranks: a process group, or a range of ranks; None for all ranks of the run.
        """
        if isinstance(ranks, range):
            return cls(None, ranks, ranks.index(dist.get_rank()))
        group = ranks
        index = dist.get_rank(group)
        if has_host_backend(group) or not has_host_backend(None):
            return cls(group, range(dist.get_world_size(group)), index)
        # The group communicates only between GPUs, so objects are sent through the group of all ranks.
        return cls(None, dist.get_process_group_ranks(group), index)

    def reduce(self, value: T, combine: Callable[[T, T], T]) -> T:
        """Collective: combine the values of all members on the root, in the order of the members.

        Args:
            value: picklable value of this process.
            combine: associative function `combine(low, high)` of two values; `low` comes from earlier members.

        Returns:
            On the root, the combination of all values. On other members, the combination of some values.
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

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Collective: return the root's `payload` on every member; the `payload` of other members is ignored."""
        # The lowest bit of the index is the distance to the sender. The root has no sender and sends in all steps.
        step = self.index & -self.index
        if self.index > 0:
            payload = self._receive(self.index - step)
        else:
            step = 1 << (len(self.members) - 1).bit_length()
        # Send to the farthest member first, because its part of the tree is the largest.
        step //= 2
        while step:
            if self.index + step < len(self.members):
                self._send(payload, self.index + step)
            step //= 2
        return payload

    def broadcast_object(self, value: T) -> T:
        """Collective: return the root's `value` on every member; the `value` of other members is ignored."""
        is_root = self.index == 0
        payload = self.broadcast_bytes(pickle.dumps(value) if is_root else None)
        return value if is_root else pickle.loads(payload)

    def _send(self, payload: bytes, index: int) -> None:
        """Send bytes to the member with an index; this member must call `_receive`."""
        send_bytes(payload, self.members[index], self.group)

    def _receive(self, index: int) -> bytes:
        """Receive bytes from the member with an index."""
        return receive_bytes(self.members[index], self.group)


def has_host_backend(group: dist.ProcessGroup | None) -> bool:
    """Return True if a process group (None for the group of all ranks) can communicate tensors in host memory."""
    return "cpu:" in dist.get_backend_config(group)


def send_bytes(payload: bytes, peer: int, group: dist.ProcessGroup | None) -> None:
    """Send bytes to the rank `peer` of a process group, in two messages: the number of bytes, then the bytes."""
    device = _message_device(group)
    dist.send(torch.tensor([len(payload)], device=device), group=group, group_dst=peer)
    # The payload is copied to a bytearray, because torch warns if memory is read-only.
    dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device), group=group, group_dst=peer)


def receive_bytes(peer: int, group: dist.ProcessGroup | None) -> bytes:
    """Receive bytes that the rank `peer` of a process group sends with `send_bytes`."""
    device = _message_device(group)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, group=group, group_src=peer)
    payload = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.recv(payload, group=group, group_src=peer)
    return payload.cpu().numpy().tobytes()


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of the messages: the host, or the current GPU if the group communicates only between GPUs."""
    if has_host_backend(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
