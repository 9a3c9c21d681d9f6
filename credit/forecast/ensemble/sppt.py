"""Stochastically perturbed tendencies (SPPT), which represent model error in an ensemble.

The change over a step that the network predicts is multiplied by 1 + r, with the same r for all prognostic channels of
a column (Buizza, Miller and Palmer 1999, doi:10.1002/qj.49712556006). r is a Gaussian random field on the sphere with a
correlation length of some hundred kilometres, and a first-order autoregression in time. r is limited to [-1, 1], so the
factor never reverses the sign of a change.

Shape suffixes: B batch, H latitude rows, W longitude columns.
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
from credit.forecast.rollout import DrawFactors, ForecastStart, build_member_rng
from credit.grid import LatLonGrid
from credit.parallel.domain.domain import Domain
from credit.parallel.host_copy import to_device
from credit.physics.spherical_harmonics import CorrelatedNoise

if TYPE_CHECKING:
    from credit.config.sections.inference import EnsembleConfig


# Stream of `build_member_rng` that only this perturbation uses.
_RNG_STREAM = 2


@register_perturbation("sppt", SPPTSection)
class SPPT(TendencyPerturbation):
    """Stochastically perturbed tendencies: generator of the factors 1 + r that multiply each step's change.

    Args:
        context: grid, time step and seed of the ensemble.
        section: amplitude, correlation length and correlation time of r.
    """

    def __init__(self, context: PerturbationContext, section: SPPTSection) -> None:
        super().__init__(context, section)
        self._amplitude = section.amplitude
        self._noise = CorrelatedNoise(context.grid, section.length)
        # Correlation between the patterns of two successive steps.
        self._autocorrelation = math.exp(-context.step_minutes / parse_duration(section.time))
        self._first_perturbed = 1 if context.has_control else 0

    def factors(self, starts: Sequence[ForecastStart], device: torch.device) -> Iterator[Tensor]:
        """Yield the factors 1 + r of each successive step, (B, 1, H, W); the sequence never ends.

        Args:
            starts: starts of the forecasts of the batch.
            device: device of the result.
        """
        generators = [build_member_rng(self.context.seed, start, _RNG_STREAM) for start in starts]
        pattern_B1HW = self._sample_patterns(generators)
        # 1 for a perturbed member, 0 for a control.
        is_perturbed = [start.member >= self._first_perturbed for start in starts]
        is_perturbed_B111 = np.array(is_perturbed, dtype=np.float32)[:, None, None, None]
        # The weight of the new noise keeps the variance of the pattern at 1.
        noise_weight = math.sqrt(1.0 - self._autocorrelation**2)
        while True:
            r_B1HW = np.clip(self._amplitude * pattern_B1HW, -1.0, 1.0)
            yield to_device(1.0 + is_perturbed_B111 * r_B1HW, device)
            pattern_B1HW = self._autocorrelation * pattern_B1HW + noise_weight * self._sample_patterns(generators)

    def _sample_patterns(self, generators: Sequence[np.random.Generator]) -> np.ndarray:
        """Return one random field of variance 1 for each generator, (B, 1, H, W) float32."""
        return np.stack([self._noise.draw(1, generator) for generator in generators])


def build_tendency_perturbation(
    conf: EnsembleConfig | None, grid: LatLonGrid, step_minutes: int, domain: Domain | None = None
) -> DrawFactors | None:
    """Build the function that generates the factors of ``inference.ensemble.stochastic``; None if this key is not set.

    Args:
        conf: config section ``inference.ensemble``; None for a single forecast.
        grid: grid of the fields.
        step_minutes: time step of the model in minutes.
        domain: the ranks that share the fields; None if this rank has whole fields.
    """
    if conf is None or conf.stochastic is None:
        return None
    context = PerturbationContext(grid, step_minutes, conf.seed, conf.control)
    draw_factors = PERTURBATIONS.find_class(conf.stochastic.kind)(context, conf.stochastic).factors
    if domain is None:
        return draw_factors

    def draw_factors_on_part(starts: Sequence[ForecastStart], device: torch.device) -> Iterator[Tensor]:
        for factors_B1HW in draw_factors(starts, device):
            yield factors_B1HW[(..., *domain.part.slices)]

    return draw_factors_on_part
