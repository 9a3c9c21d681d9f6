"""Account of the seconds, bytes and peak rates of one rank's steps, and collection of the accounts of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist

from credit.train.profile.calibration import MachineRates
from credit.utils.profiling.phases import Phase


@dataclass(frozen=True)
class RankAccount:
    """Times and bytes of one rank, as means per step.

    Attributes:
        wall: elapsed seconds per step.
        seconds: phase -> seconds per step; the phases are disjoint. The phase of communication includes only the
            exposed part, in which the rank does not compute.
        processor_seconds: phase -> processor seconds per step of the main thread in this phase; empty on a GPU.
        rates: measured peak rates.
        idle: seconds per step in which the GPU had no work; 0 on a CPU.
        hidden_communication: seconds per step of communication during which the rank computed.
        hidden_loader: seconds per step in which the threads of the loader worked and the rank did not wait for them.
        hidden_checkpoint: seconds per step in which the checkpoint thread wrote and the rank did not wait for it.
        hidden_copy: seconds per step of copies from the host to a GPU during which the GPU computed.
        sent_bytes: bytes per step that the rank sent in collectives; None if unknown.
        loaded_bytes: bytes per step of the samples that the rank read, uncompressed.
        updated_bytes: bytes per step that the optimizer reads and writes; None if unknown.
    """

    wall: float
    seconds: dict[Phase, float]
    processor_seconds: dict[Phase, float]
    rates: MachineRates
    idle: float = 0.0
    hidden_communication: float = 0.0
    hidden_loader: float = 0.0
    hidden_checkpoint: float = 0.0
    hidden_copy: float = 0.0
    sent_bytes: float | None = None
    loaded_bytes: float = 0.0
    updated_bytes: float | None = None

    @property
    def accounted_seconds(self) -> float:
        """Seconds per step in all phases, including the idle time of a GPU."""
        return sum(self.seconds.values()) + self.idle

    @property
    def work_seconds(self) -> float:
        """Seconds per step in which the rank does not wait for other ranks."""
        return self.wall - self.seconds.get(Phase.COMMUNICATION, 0.0)

    def to_values(self) -> list[float]:
        """Return all numbers of the account as a list in a fixed order, with NaN for unknown numbers."""
        values = [self.seconds.get(name, 0.0) for name in Phase]
        values += [self.processor_seconds.get(name, 0.0) for name in Phase]
        for name in _scalar_names():
            values.append(_to_float(getattr(self, name)))
        for rate in fields(MachineRates):
            values.append(_to_float(getattr(self.rates, rate.name)))
        return values

    @classmethod
    def from_values(cls, values: list[float]) -> RankAccount:
        """Return the account for a list of numbers from `to_values`."""
        numbers = iter(values)
        seconds = {name: next(numbers) for name in Phase}
        processor = {name: next(numbers) for name in Phase}
        scalars = {name: _from_float(next(numbers)) for name in _scalar_names()}
        rates = {rate.name: _from_float(next(numbers)) for rate in fields(MachineRates)}
        return cls(seconds=seconds, processor_seconds=processor, rates=MachineRates(**rates), **scalars)


@dataclass(frozen=True)
class RankSummary:
    """Accounts of all ranks.

    Attributes:
        accounts: account of each rank.
        slowest_rank: rank with the largest `RankAccount.work_seconds`; the other ranks wait for this rank.
    """

    accounts: list[RankAccount]
    slowest_rank: int = field(init=False)

    def __post_init__(self) -> None:
        work = [account.work_seconds for account in self.accounts]
        object.__setattr__(self, "slowest_rank", work.index(max(work)))


def gather_accounts(account: RankAccount) -> RankSummary:
    """Collective: return the accounts of all ranks, on every rank. Each rank sends a few hundred bytes."""
    values = torch.tensor(account.to_values(), dtype=torch.float64)
    if not dist.is_initialized():
        return RankSummary([account])
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return RankSummary([RankAccount.from_values(row.tolist()) for row in gathered])


def _scalar_names() -> Iterator[str]:
    """Yield the names of the attributes of `RankAccount` that are numbers."""
    for attribute in fields(RankAccount):
        if attribute.name not in ("seconds", "processor_seconds", "rates"):
            yield attribute.name


def _to_float(value: float | None) -> float:
    """Return the value, or NaN if it is None."""
    return math.nan if value is None else value


def _from_float(value: float) -> float | None:
    """Return the value, or None if it is NaN."""
    return None if math.isnan(value) else value
