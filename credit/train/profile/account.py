"""Account of one rank: seconds, bytes and peak rates of its steps, and their reduction over the ranks."""

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
    """Mean step of one rank.

    Attributes:
        wall: seconds of a step.
        seconds: phase -> seconds a step; the phases are disjoint, and communication is the exposed part.
        processor: phase -> processor seconds a step of the main thread in it; empty on a GPU.
        rates: measured peak rates.
        idle: seconds a step in which a GPU had nothing to do; 0 on a CPU.
        hidden_communication: seconds a step of communication while the rank computed.
        hidden_loader: seconds a step that the loader's threads worked while the rank did not wait for them.
        hidden_checkpoint: seconds a step that the thread of checkpoints wrote.
        hidden_copy: seconds a step of copies to and from a GPU while it computed.
        sent_bytes: bytes a step that the rank sent in collectives; None if unknown.
        loaded_bytes: bytes a step of the samples that the rank read, uncompressed.
        updated_bytes: bytes a step that the optimizer reads and writes; None if unknown.
    """

    wall: float
    seconds: dict[Phase, float]
    processor: dict[Phase, float]
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
    def accounted(self) -> float:
        """Seconds a step of all phases."""
        return sum(self.seconds.values()) + self.idle

    @property
    def work(self) -> float:
        """Seconds a step in which the rank does not wait for other ranks."""
        return self.wall - self.seconds.get(Phase.COMMUNICATION, 0.0)

    def to_values(self) -> list[float]:
        """Return all numbers in a fixed order; NaN for those that are not known."""
        values = [self.seconds.get(name, 0.0) for name in Phase]
        values += [self.processor.get(name, 0.0) for name in Phase]
        for name in _scalar_names():
            values.append(_to_float(getattr(self, name)))
        for rate in fields(MachineRates):
            values.append(_to_float(getattr(self.rates, rate.name)))
        return values

    @classmethod
    def from_values(cls, values: list[float]) -> RankAccount:
        """Return the account with these numbers, from `to_values`."""
        numbers = iter(values)
        seconds = {name: next(numbers) for name in Phase}
        processor = {name: next(numbers) for name in Phase}
        scalars = {name: _from_float(next(numbers)) for name in _scalar_names()}
        rates = {rate.name: _from_float(next(numbers)) for rate in fields(MachineRates)}
        return cls(seconds=seconds, processor=processor, rates=MachineRates(**rates), **scalars)


@dataclass(frozen=True)
class RankSummary:
    """Accounts of all ranks.

    Attributes:
        accounts: account of each rank.
        slowest: the rank with the most work, which the others wait for.
    """

    accounts: list[RankAccount]
    slowest: int = field(init=False)

    def __post_init__(self) -> None:
        work = [account.work for account in self.accounts]
        object.__setattr__(self, "slowest", work.index(max(work)))


def gather_accounts(account: RankAccount) -> RankSummary:
    """Collective: return the accounts of all ranks, on every rank; a rank sends some hundred bytes."""
    values = torch.tensor(account.to_values(), dtype=torch.float64)
    if not dist.is_initialized():
        return RankSummary([account])
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return RankSummary([RankAccount.from_values(row.tolist()) for row in gathered])


def _scalar_names() -> Iterator[str]:
    """Yield the names of the attributes of `RankAccount` that are numbers."""
    for attribute in fields(RankAccount):
        if attribute.name not in ("seconds", "processor", "rates"):
            yield attribute.name


def _to_float(value: float | None) -> float:
    """Return a number, NaN for None."""
    return math.nan if value is None else value


def _from_float(value: float) -> float | None:
    """Return a number, None for NaN."""
    return None if math.isnan(value) else value
