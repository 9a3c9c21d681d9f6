"""Errors of the model itself in an ensemble: what it predicts as change is multiplied by random numbers.

Stochastically perturbed tendencies (Buizza, Miller and Palmer 1999, doi:10.1002/qj.49712556006): the change over a step
of all prognostic channels of a column is multiplied by 1 + r. r is a Gaussian field on the sphere, correlated over some
hundred kilometres, that follows a first-order autoregression in time. It is limited to [-1, 1], so that no change turns
round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from credit.calendar import parse_duration
from credit.config.registry import PERTURBATIONS
from credit.forecast.ensemble.base import PerturbationContext, TendencyPerturbation, register_perturbation
from credit.forecast.ensemble.section import SPPTSection
from credit.forecast.rollout import ForecastStart, Stochastic, member_rng
from credit.grid import LatLonGrid
from credit.parallel.host_copy import to_device
from credit.physics.spherical_harmonics import CorrelatedNoise

if TYPE_CHECKING:
    from credit.config.sections.inference import EnsembleConfig


@register_perturbation("sppt", SPPTSection)
class SPPT(TendencyPerturbation):
    """Draws the factors of each step's change.

    Args:
        context: of the ensemble.
        section: amplitude, length and time of the random field.
    """

    def __init__(self, context: PerturbationContext, section: SPPTSection) -> None:
        super().__init__(context, section)
        self._amplitude = section.amplitude
        self._noise = CorrelatedNoise(context.grid, section.length)
        self._memory = math.exp(-context.step_minutes / parse_duration(section.time))
        self._first_perturbed = 1 if context.has_control else 0

    def factors(self, starts: Sequence[ForecastStart], device: torch.device) -> Iterator[Tensor]:
        """See the base class."""
        generators = [member_rng(self.context.seed, start, 2) for start in starts]
        pattern = self._draw(generators)
        is_perturbed = np.array([start.member >= self._first_perturbed for start in starts], dtype=np.float32)
        is_perturbed_B111 = is_perturbed[:, None, None, None]
        while True:
            r = np.clip(self._amplitude * pattern, -1.0, 1.0)
            yield to_device(1.0 + is_perturbed_B111 * r, device)
            pattern = self._memory * pattern + math.sqrt(1.0 - self._memory**2) * self._draw(generators)

    def _draw(self, generators: Sequence[np.random.Generator]) -> np.ndarray:
        return np.stack([self._noise.draw(1, generator) for generator in generators])


def build_stochastic(conf: EnsembleConfig | None, grid: LatLonGrid, step_minutes: int) -> Stochastic | None:
    """Return the function that draws the factors of ``inference.ensemble.stochastic``, None where there are none."""
    if conf is None or conf.stochastic is None:
        return None
    context = PerturbationContext(grid, step_minutes, conf.seed, conf.control)
    return PERTURBATIONS.find_class(conf.stochastic.kind)(context, conf.stochastic).factors
