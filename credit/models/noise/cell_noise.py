"""Noise of each cell of the grid (AIFS-CRPS, Lang et al. 2024, arXiv 2412.15832).

Shape suffixes: K channels, H and W rows and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from credit.models.base import ModelSpec
from credit.models.noise.base import GaussianNoise, register_noise
from credit.models.noise.section import CellNoiseSection


@register_noise("cell", CellNoiseSection)
class CellNoise(GaussianNoise):
    """Gaussian noise that is independent from cell to cell.

    Each rank samples the complete global field, even if it needs only a part of the field.

    Args:
        spec: grid, time step and channels of the data.
        section: entry of ``model.noise`` in the config that describes this noise.
    """

    def __init__(self, spec: ModelSpec, section: CellNoiseSection) -> None:
        super().__init__(spec, section)
        self._shape = (section.channels, *spec.grid.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (K channels, H rows, W columns) of the noise of one member at one step."""
        return self._shape

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return independent Gaussian numbers (K, H, W) with mean 0 and variance 1, float32 on the CPU."""
        return torch.randn(self._shape, generator=generator)
