"""Noise that is spatially correlated on the sphere (FourCastNet 3, Bonev et al. 2025, arXiv 2507.12144).

Shape suffixes: K fields, H and W rows and columns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from credit.models.base import ModelSpec
from credit.models.noise.base import GaussianNoise, register_noise, repeat_evenly
from credit.models.noise.section import SphericalNoiseSection
from credit.physics.spherical_harmonics import CorrelatedNoise


@register_noise("spherical", SphericalNoiseSection)
class SphericalNoise(GaussianNoise):
    """Gaussian random fields with several correlation lengths, see `SphericalNoiseSection`.

    Args:
        spec: grid, time step and channels of the data.
        section: entry of ``model.noise`` in the config that describes this noise.
    """

    def __init__(self, spec: ModelSpec, section: SphericalNoiseSection) -> None:
        super().__init__(spec, section)
        self._shape = (section.channels, *spec.grid.shape)
        # A generator for each correlation length, and the number of fields that it samples.
        self._sources: list[tuple[CorrelatedNoise, int]] = []
        length_of_channel = repeat_evenly(section.lengths, section.channels)
        for length in section.lengths:
            self._sources.append((CorrelatedNoise(spec.grid, length), length_of_channel.count(length)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (K fields, H rows, W columns) of the noise of one member at one step."""
        return self._shape

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return random fields (K, H, W) with mean 0 and variance 1, float32 on the CPU."""
        # `CorrelatedNoise` samples with numpy, so the generator of torch only provides the seed.
        numpy_generator = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        fields = [source.draw(count, numpy_generator) for source, count in self._sources]
        return torch.from_numpy(np.concatenate(fields))
