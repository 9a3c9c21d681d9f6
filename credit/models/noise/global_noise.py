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
    """A vector of independent Gaussian numbers.

    Args:
        spec: what the model is built from.
        section: the entry of ``model.noise``.
    """

    def __init__(self, spec: ModelSpec, section: GlobalNoiseSection) -> None:
        super().__init__(spec, section)
        self._channels = section.channels

    @property
    def shape(self) -> tuple[int, ...]:
        """See the base class."""
        return (self._channels,)

    def draw(self, generator: torch.Generator) -> Tensor:
        """See the base class."""
        return torch.randn(self._channels, generator=generator)
