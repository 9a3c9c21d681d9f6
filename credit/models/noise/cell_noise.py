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
    """Gaussian numbers that are independent from cell to cell.

    The field of the whole globe is drawn, whatever part of it a rank needs.

    Args:
        spec: what the model is built from.
        section: the entry of ``model.noise``.
    """

    def __init__(self, spec: ModelSpec, section: CellNoiseSection) -> None:
        super().__init__(spec, section)
        self._shape = (section.channels, *spec.grid.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """See the base class."""
        return self._shape

    def draw(self, generator: torch.Generator) -> Tensor:
        """See the base class."""
        return torch.randn(self._shape, generator=generator)
