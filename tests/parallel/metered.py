"""A plugin (``plugins: [tests.parallel.metered]``): GPUs whose energy is 100 J at each look, times the rank and one."""

from __future__ import annotations

import torch

from credit.parallel.object_collectives import rank_of
from credit.train.monitor import usage


class Metered:
    """In the place of `credit.train.monitor.gpu_energy.EnergyMeter`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self) -> float:
        """Return this rank's joules."""
        return 100.0 * (rank_of() + 1)


usage.EnergyMeter = Metered
