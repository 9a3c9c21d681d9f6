"""Dropout that stays active in validation and in forecasts (Gal and Ghahramani 2016, arXiv 1506.02142).

Shape suffixes: B keys (members of forecasts), M values of ``memory``.
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
    """Noise that consists of seeds, one for each value of ``memory``; the network computes dropout masks from them.

    A mask cannot change gradually, so ``memory`` is the time after which a new mask is sampled. With a memory of 0,
    each step has a new mask; with infinite memory, all steps of a forecast have the same mask.
    """

    def sequence(self, keys: Sequence[MemberKey], device: torch.device) -> Iterator[Tensor]:
        """Yield the int64 seeds (B keys, M values of ``memory``) of successive steps; the sequence never ends.

        Args:
            keys: the members that need seeds.
            device: device of the seeds.
        """
        for step in itertools.count():
            # The seed is derived from the index of the mask instead of the step, so steps with the same mask have the
            # same seed.
            mask_numbers_M = [self._find_mask_index(step, memory) for memory in self.memory_minutes]
            seeds_BM = []
            for key in keys:
                seeds_BM.append([self.derive_seed_at(key, mask_number) for mask_number in mask_numbers_M])
            yield to_device(torch.tensor(seeds_BM, dtype=torch.int64), device)

    def _find_mask_index(self, step: int, memory_minutes: float) -> int:
        """Return the index of the mask at a step, both counted from 0, for one value of ``memory`` in minutes."""
        if memory_minutes == 0:
            return step
        if math.isinf(memory_minutes):
            return 0
        return int(step * self.step_minutes // memory_minutes)
