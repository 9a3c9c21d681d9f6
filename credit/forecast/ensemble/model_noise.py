"""Noise inputs of a network that was trained with noise (``model.noise``), for the members of an ensemble forecast.

Shape suffixes: B batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credit.config.sections.model import ModelSection
from credit.forecast.rollout import ForecastStart
from credit.forecast.stepper import Condition
from credit.models.base import ModelSpec
from credit.models.noise.base import MemberKey, NoiseGenerator
from credit.parallel.host_copy import to_device

if TYPE_CHECKING:
    from credit.config.sections.inference import EnsembleConfig


class ModelNoise:
    """Generator of the noise inputs of the network for the forecasts of an ensemble.

    The noise of a member depends only on the seed, the initial time and the number of the member. The noise of the
    control is 0, which has no effect on the output of the network.

    With ``model_noise.pairs``, the two members of a pair have opposite noise. To first order, their deviations from the
    forecast without noise cancel. So the ensemble mean has a smaller sampling error than the mean of independent
    members.

    Args:
        conf: config section ``inference.ensemble``.
        noise: generator of the noise of all entries of ``model.noise``.
    """

    def __init__(self, conf: EnsembleConfig, noise: NoiseGenerator) -> None:
        self._seed = conf.seed
        self._noise = noise
        self._amplitude = conf.model_noise.amplitude
        self._has_pairs = conf.model_noise.pairs
        self._first_noisy_member = 1 if conf.control else 0

    def __call__(self, starts: Sequence[ForecastStart], device: torch.device) -> Iterator[Condition | None]:
        """Yield the noise inputs of each successive step; the sequence never ends.

        Args:
            starts: starts of the B forecasts of the batch.
            device: device of the result.

        Yields:
            Mapping from kind of noise to the noise (B, ...) of the forecasts.
        """
        # Noise that can be scaled is generated once for a pair and multiplied by the factor of the member. Other noise
        # (dropout seeds) is generated for each member and multiplied by True, or by False for the control.
        member_keys = []
        draw_keys = []
        is_noisy = []
        factors = []
        for start in starts:
            # The number of a member with noise starts from 0; the control has the number -1.
            number = start.member - self._first_noisy_member
            draw_number = max(0, number)
            if self._has_pairs:
                draw_number //= 2
            sign = -1.0 if self._has_pairs and number % 2 == 1 else 1.0
            member_keys.append(MemberKey(self._seed, start.initial_minutes, start.member))
            draw_keys.append(MemberKey(self._seed, start.initial_minutes, draw_number))
            is_noisy.append(number >= 0)
            factors.append(sign * self._amplitude if number >= 0 else 0.0)
        is_noisy_B = to_device(torch.tensor(is_noisy), device)
        factor_B = to_device(torch.tensor(factors), device)

        sequences = {}
        factors_by_kind = {}
        for kind, noise in self._noise.kinds.items():
            sequences[kind] = noise.sequence(draw_keys if noise.can_be_scaled else member_keys, device)
            factors_by_kind[kind] = factor_B if noise.can_be_scaled else is_noisy_B
        # Each iteration advances all kinds of noise by one step of the forecast.
        while True:
            condition = {}
            for kind, sequence in sequences.items():
                condition[kind] = _multiply_samples(next(sequence), factors_by_kind[kind])
            yield condition


def _multiply_samples(noise: Tensor, factor_B: Tensor) -> Tensor:
    """Return noise (B, ...) multiplied by the factor (B,) of each sample."""
    other_dims = [1] * (noise.dim() - 1)
    return noise * factor_B.view(-1, *other_dims)


def build_model_noise(conf: EnsembleConfig | None, spec: ModelSpec, section: ModelSection) -> ModelNoise | None:
    """Build the generator of the network's noise inputs; None for a single forecast or a network without noise.

    Args:
        conf: config section ``inference.ensemble``; None for a single forecast.
        spec: grid, time step and channels of the data.
        section: config section ``model`` of the training run.
    """
    if conf is None or not section.noise:
        return None
    return ModelNoise(conf, NoiseGenerator(spec, section))
