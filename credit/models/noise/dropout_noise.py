"""Dropout that stays active in validation and in forecasts (Gal and Ghahramani 2016, arXiv 1506.02142).

Shape suffixes: B forecasts, M memories.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from credit.models.noise.base import MemberKey, Noise, register_noise
from credit.models.noise.section import DropoutNoiseSection
from credit.parallel.host_copy import to_device


@register_noise("dropout", DropoutNoiseSection)
class DropoutNoise(Noise):
    """Seeds of dropout masks, one for each memory; the network computes its masks from them.

    A mask cannot change gradually. With a duration as memory, it is drawn anew each time the duration has passed.
    """

    def sequence(self, keys: Sequence[MemberKey], device: torch.device) -> Iterator[Tensor]:
        """Yield the seeds (B, M), int64, of each step of a forecast, one row for each key; see the base class."""
        for step in itertools.count():
            # The number of the mask, counted from the first step.
            numbers_M = [self._mask_number(step, memory) for memory in self.memory_minutes]
            rows = [[self.seed_at(key, number) for number in numbers_M] for key in keys]
            yield to_device(torch.tensor(rows, dtype=torch.int64), device)

    def _mask_number(self, step: int, memory_minutes: float) -> int:
        """Return the number of the mask that is in use at a step, for one memory."""
        if memory_minutes == 0:
            return step
        if math.isinf(memory_minutes):
            return 0
        return int(step * self.step_minutes // memory_minutes)
