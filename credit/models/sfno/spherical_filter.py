"""Filter on the sphere: multiplies the spherical-harmonic coefficients of tokens by learned weights.

Analysis, product and synthesis are computed in float32, also under autocast. With fewer digits, the rounding errors of
the longest waves would exceed the amplitude of the shortest waves.

Shape suffixes: B batch, H and W rows and columns, C channels, l degrees, R rows of a matrix product (order and sample),
D real and imaginary parts of all channels (2 C).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from credit.models.kernels.autocast import without_autocast
from credit.models.sfno.token_transform import TokenTransform


class SphericalFilter(nn.Module):
    """Convolution on the sphere: a complex matrix for each degree mixes the channels of the coefficients.

    Orders are not mixed, so a rotation of the input in longitude rotates the output. The matrix is the same for all
    orders of a degree, as in the convolution theorem (Driscoll and Healy 1994, doi:10.1006/aama.1994.1008). The
    imaginary part of the matrix shifts waves in longitude, so the layer is equivariant only under rotations in
    longitude.

    If the two grids differ, the layer also transfers the tokens of the residual connection to the output grid.

    Args:
        dim: channels of the tokens.
        analysis: transform on the grid of the input.
        synthesis: transform on the grid of the output, with the same largest degree.
        gain: initial variance of the output, for tokens of variance 1 without waves beyond the largest degree.
    """

    def __init__(self, dim: int, analysis: TokenTransform, synthesis: TokenTransform, gain: float = 1.0) -> None:
        super().__init__()
        self.analysis = analysis
        self.synthesis = synthesis
        self.gain = gain
        # Real and imaginary part of the weight of each pair of an input channel and an output channel.
        self.weight = nn.Parameter(torch.empty(analysis.max_degree + 1, dim, dim, 2))

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return the initial weight on the CPU: normal numbers, scaled so that the output has the variance `gain`.

        Args:
            key: ``weight``.
            shape: (degrees, input channels, output channels, 2).
            generator: random generator on the CPU.
        """
        # For each output channel, the squares of both parts, summed over the input channels, have the expectation
        # `gain`.
        return torch.randn(shape, generator=generator, device="cpu") * math.sqrt(self.gain / (2 * shape[1]))

    def forward(self, x_BHWC: Tensor, normed_BHWC: Tensor) -> Tensor:
        """Return the sum of the residual connection and the filtered tokens (B, H, W, C), on the grid of the output.

        Args:
            x_BHWC: tokens of the residual connection; the result has the same dtype.
            normed_BHWC: tokens to filter, of any dtype.
        """
        changes_grid = self.analysis is not self.synthesis
        with without_autocast(x_BHWC):
            # Tables and products are float32, or float64 in a float64 network.
            dtype = torch.promote_types(x_BHWC.dtype, torch.float32)
            coefficient_lRD = self.analysis.analyse(normed_BHWC.to(dtype)) @ self._build_matrix(dtype)
            if changes_grid:
                coefficient_lRD = coefficient_lRD + self.analysis.analyse(x_BHWC.to(dtype))
            y_BHWC = self.synthesis.synthesise(coefficient_lRD).to(x_BHWC.dtype)
        return y_BHWC if changes_grid else x_BHWC + y_BHWC

    def _build_matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the complex matrices of all degrees as real matrices (l, D, D).

        Coefficients are rows with all real parts followed by all imaginary parts; the matrix is multiplied from the
        right.
        """
        real_lCC, imaginary_lCC = self.weight.to(dtype).unbind(-1)
        from_real = torch.cat((real_lCC, imaginary_lCC), dim=2)
        from_imaginary = torch.cat((-imaginary_lCC, real_lCC), dim=2)
        return torch.cat((from_real, from_imaginary), dim=1)
