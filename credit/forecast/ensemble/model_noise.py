"""Noise inside the network (`model.noise`) in forecasts, by which the members of a trained ensemble differ."""

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
    """Draws of the noise inside the network for the forecasts of an ensemble.

    The noise of a member depends only on the seed, the initial time and the member. The control has none: its noise is
    zero, with which the network computes what it would without noise.

    Args:
        conf: section inference.ensemble.
        noise: the kinds of noise of the model.
    """

    def __init__(self, conf: EnsembleConfig, noise: NoiseGenerator) -> None:
        self._seed = conf.seed
        self._noise = noise
        self._first_noisy_member = 1 if conf.control else 0

    def __call__(self, starts: Sequence[ForecastStart], device: torch.device) -> Iterator[Condition | None]:
        """Yield the noise of each step of these forecasts, by kind."""
        keys = [MemberKey(self._seed, start.initial_minutes, start.member) for start in starts]
        is_noisy = [start.member >= self._first_noisy_member for start in starts]
        is_noisy_B = to_device(torch.tensor(is_noisy), device)
        for condition in self._noise.sequence(keys, device):
            yield {kind: _select_samples(noise, is_noisy_B) for kind, noise in condition.items()}


def _select_samples(noise: Tensor, is_noisy_B: Tensor) -> Tensor:
    """Return noise (B, ...) with zeros, which are no noise, for the samples that have none."""
    return noise * is_noisy_B.view(-1, *[1] * (noise.dim() - 1))


def build_model_noise(conf: EnsembleConfig | None, spec: ModelSpec, section: ModelSection) -> ModelNoise | None:
    """Return the draws of the noise inside the network; None for a single forecast or a network without noise.

    Args:
        conf: section inference.ensemble.
        spec: what the model was built from.
        section: the model section that the weights were trained with.
    """
    if conf is None or not section.noise:
        return None
    return ModelNoise(conf, NoiseGenerator(spec, section))
