"""Noise inputs of a network that was trained with noise (``model.noise``); the members of an ensemble differ by them.

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

    The noise of a member depends only on the seed, the initial time and the member. The noise of the control is 0, for
    which the network gives the same output as without noise.

    Args:
        conf: config section ``inference.ensemble``.
        noise: generator of the noise of all entries of ``model.noise``.
    """

    def __init__(self, conf: EnsembleConfig, noise: NoiseGenerator) -> None:
        self._seed = conf.seed
        self._noise = noise
        self._first_noisy_member = 1 if conf.control else 0

    def __call__(self, starts: Sequence[ForecastStart], device: torch.device) -> Iterator[Condition | None]:
        """Yield, for each step without end, kind of noise -> noise (B, ...).

        Args:
            starts: starts of the B forecasts of the batch.
            device: device of the result.
        """
        keys = [MemberKey(self._seed, start.initial_minutes, start.member) for start in starts]
        is_noisy = [start.member >= self._first_noisy_member for start in starts]
        is_noisy_B = to_device(torch.tensor(is_noisy), device)
        for condition in self._noise.sequence(keys, device):
            yield {kind: _select_samples(noise, is_noisy_B) for kind, noise in condition.items()}


def _select_samples(noise: Tensor, is_noisy_B: Tensor) -> Tensor:
    """Return noise (B, ...) with zeros in the samples where `is_noisy_B` is False."""
    return noise * is_noisy_B.view(-1, *[1] * (noise.dim() - 1))


def build_model_noise(conf: EnsembleConfig | None, spec: ModelSpec, section: ModelSection) -> ModelNoise | None:
    """Return the generator of the network's noise inputs; None for a single forecast or a network without noise.

    Args:
        conf: config section ``inference.ensemble``; None for a single forecast.
        spec: grid, time step and channels that the model was built for.
        section: config section ``model`` that the weights were trained with.
    """
    if conf is None or not section.noise:
        return None
    return ModelNoise(conf, NoiseGenerator(spec, section))
