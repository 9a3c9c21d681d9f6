"""Plugin (``plugins: [tests.parallel.commands.fake_energy_meter]``) that replaces the GPU energy meter.

Each reading is 100 J * (rank + 1), so that the sum over the ranks shows if every rank was counted.
"""

from __future__ import annotations

import torch

from credit.parallel.object_collectives import current_rank
from credit.train.monitor import usage


class FakeEnergyMeter:
    """Replacement for `credit.train.monitor.gpu_energy.RankEnergyMeter`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pop_joules(self) -> float:
        """Return this rank's joules."""
        return 100.0 * (current_rank() + 1)


usage.RankEnergyMeter = FakeEnergyMeter
