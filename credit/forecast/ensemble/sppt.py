"""Errors of the model itself in an ensemble: what it predicts as change is multiplied by random numbers.

Stochastically perturbed tendencies (Buizza, Miller and Palmer 1999, doi:10.1002/qj.49712556006): the change over a step
of all prognostic channels of a column is multiplied by 1 + r. r is a Gaussian field on the sphere, correlated over some
hundred kilometres, that follows a first-order autoregression in time. It is limited to [-1, 1], so that no change turns
round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from credit.calendar import parse_duration
from credit.config.schema_inference import EnsembleConfig
from credit.forecast.rollout import ForecastStart, member_rng
from credit.grid import LatLonGrid
from credit.parallel.host_copy import to_device
from credit.physics.spherical_harmonics import CorrelatedNoise


class SPPT:
    """Draws the factors of each step's change, which depend on seed, initial time and member alone.

    Args:
        conf: with `stochastic`.
        grid: of the fields.
        step_minutes: time step.
    """

    def __init__(self, conf: EnsembleConfig, grid: LatLonGrid, step_minutes: int) -> None:
        chosen = conf.stochastic
        assert chosen is not None
        self._amplitude, self._seed = chosen.amplitude, conf.seed
        self._noise = CorrelatedNoise(grid, chosen.length)
        self._memory = math.exp(-step_minutes / parse_duration(chosen.time))
        self._first = 1 if conf.control else 0

    def __call__(self, starts: Sequence[ForecastStart], device: torch.device) -> Iterator[Tensor]:
        """Yield for each step the factors (B, 1, H, W); those of an unperturbed member 0 are 1."""
        generators = [member_rng(self._seed, start, 2) for start in starts]
        pattern = self._draw(generators)
        moving = np.array([start.member >= self._first for start in starts], dtype=np.float32)[:, None, None, None]
        while True:
            r = np.clip(self._amplitude * pattern, -1.0, 1.0)
            yield to_device(1.0 + moving * r, device)
            pattern = self._memory * pattern + math.sqrt(1.0 - self._memory**2) * self._draw(generators)

    def _draw(self, generators: Sequence[np.random.Generator]) -> np.ndarray:
        return np.stack([self._noise.draw(1, generator) for generator in generators])


def build_stochastic(conf: EnsembleConfig | None, grid: LatLonGrid, step_minutes: int) -> SPPT | None:
    """Return what ``inference.ensemble.stochastic`` asks for, None where it does not."""
    return None if conf is None or conf.stochastic is None else SPPT(conf, grid, step_minutes)
