"""Global noise: one random vector for each member and step (FGN, Alet et al. 2025, arXiv:2506.10772).

Shape suffixes: K elements of the vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from credit.models.base import ModelSpec
from credit.models.noise.base import GaussianNoise, register_noise
from credit.models.noise.section import GlobalNoiseSection


@register_noise("global", GlobalNoiseSection)
class GlobalNoise(GaussianNoise):
    """Noise that is one vector of independent Gaussian numbers for the complete globe.

    Args:
        spec: grid, time step and channels of the data.
        section: entry of ``model.noise`` in the config that describes this noise.
    """

    def __init__(self, spec: ModelSpec, section: GlobalNoiseSection) -> None:
        super().__init__(spec, section)
        self._channels = section.channels

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (K elements,) of the vector of one member at one step."""
        return (self._channels,)

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return independent Gaussian numbers (K,) with mean 0 and variance 1, float32 on the CPU."""
        return torch.randn(self._channels, generator=generator)
