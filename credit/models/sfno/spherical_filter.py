"""Spherical-harmonic transform of tokens, and the product of its coefficients with learned weights.

Analysis, product and synthesis are computed in float32, also under autocast: with fewer digits, the rounding errors of
the longest waves would exceed the amplitude of the shortest waves.

Shape suffixes: B batch, H and W rows and columns, C channels, 2 real and imaginary part, m orders, l degrees, R rows of a
matrix product (order and sample), D real and imaginary parts of all channels (2 C).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from credit.grid import LatLonGrid
from credit.models.kernels.autocast import without_autocast
from credit.physics.legendre_tables import LegendreTables, find_tables


class TokenTransform:
    """Transform between tokens on a grid and their spherical-harmonic coefficients.

    The object is no module, and its tables are no buffers: they are constants that all blocks and all networks of a
    process share. The network calls `load_tables` before its blocks. A copy shares the tables.

    Args:
        grid: grid of the tokens.
        max_degree: largest degree and order.
    """

    def __init__(self, grid: LatLonGrid, max_degree: int) -> None:
        self.grid = grid
        self.max_degree = max_degree
        self._num_columns = grid.shape[1]
        self._tables: LegendreTables | None = None

    def load_tables(self, x: Tensor) -> None:
        """Use from now on the tables on the device of `x`, in float64 if `x` is float64, otherwise in float32."""
        self._tables = find_tables(self.grid, self.max_degree, x)

    def analyse(self, x_BHWC: Tensor) -> Tensor:
        """Return the coefficients (l, R, D) of tokens; those of degrees below the order are 0.

        The rows R are sorted by order, then by sample. The first half of D are the real parts of all channels, the
        second half the imaginary parts.

        Args:
            x_BHWC: tokens, of the dtype of the tables.
        """
        num_samples = len(x_BHWC)
        # "forward" divides by the number of columns. Orders above `max_degree` are left out.
        waves_BHmC = torch.fft.rfft(x_BHWC, dim=2, norm="forward")[:, :, : self.max_degree + 1]
        waves_mHB2C = torch.view_as_real(waves_BHmC).permute(2, 1, 0, 4, 3)
        # One product for each order, whose columns are all samples, parts and channels.
        coefficient_ml_ = self._tables.analysis_mlH @ waves_mHB2C.flatten(2)
        coefficient_mlBD = coefficient_ml_.unflatten(2, (num_samples, -1))
        return coefficient_mlBD.transpose(0, 1).flatten(1, 2)

    def synthesise(self, coefficient_lRD: Tensor) -> Tensor:
        """Return the tokens (B, H, W, C) of coefficients, the inverse of `analyse`.

        Args:
            coefficient_lRD: coefficients, in the order in which `analyse` returns them.
        """
        coefficient_lmBD = coefficient_lRD.unflatten(1, (self.max_degree + 1, -1))
        num_samples = coefficient_lmBD.shape[2]
        waves_mH_ = self._tables.synthesis_mHl @ coefficient_lmBD.flatten(2).transpose(0, 1)
        waves_mHB2C = waves_mH_.unflatten(2, (num_samples, 2, -1))
        waves_BHmC2 = waves_mHB2C.permute(2, 1, 0, 4, 3).contiguous()
        # The mean of a row is real. Some libraries would use the imaginary part, others ignore it.
        waves_BHmC2[:, :, 0, :, 1] = 0
        return torch.fft.irfft(torch.view_as_complex(waves_BHmC2), n=self._num_columns, dim=2, norm="forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenTransform:
        """Return a copy with the same tables, which would be gigabytes on a fine grid."""
        return copy.copy(self)


class SphericalFilter(nn.Module):
    """Convolution on the sphere: a complex matrix for each degree mixes the channels of the coefficients.

    The matrix is the same for all orders of a degree (Driscoll and Healy 1994, doi:10.1006/aama.1994.1008), so that a
    rotation of the input in longitude rotates the output. If the two grids differ, the layer also transfers the tokens
    of the residual connection to the second grid.

    Args:
        dim: channels of the tokens.
        analysis: transform on the grid of the input.
        synthesis: transform on the grid of the output, with the same largest degree.
        gain: variance of the output for tokens of variance 1 without waves beyond the largest degree, at the start.
    """

    def __init__(self, dim: int, analysis: TokenTransform, synthesis: TokenTransform, gain: float = 1.0) -> None:
        super().__init__()
        self.analysis = analysis
        self.synthesis = synthesis
        self.gain = gain
        # Real and imaginary part of the weight of each input channel for each output channel.
        self.weight = nn.Parameter(torch.empty(analysis.max_degree + 1, dim, dim, 2))

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return normal numbers of `shape`, on the CPU, by which the output has the variance `gain`."""
        # The squares of both parts, summed over the input channels, have the mean `gain`.
        return torch.randn(shape, generator=generator, device="cpu") * math.sqrt(self.gain / (2 * shape[1]))

    def forward(self, x_BHWC: Tensor, normed_BHWC: Tensor) -> Tensor:
        """Return the input plus the filtered tokens (B, H, W, C), on the grid of the output, in the dtype of the input.

        Args:
            x_BHWC: tokens of the residual connection.
            normed_BHWC: tokens to be filtered, of any dtype.
        """
        changes_grid = self.analysis is not self.synthesis
        with without_autocast(x_BHWC):
            # Tables and products are float32, unless the network is float64.
            dtype = torch.promote_types(x_BHWC.dtype, torch.float32)
            coefficient_lRD = self.analysis.analyse(normed_BHWC.to(dtype)) @ self._build_matrix(dtype)
            if changes_grid:
                coefficient_lRD = coefficient_lRD + self.analysis.analyse(x_BHWC.to(dtype))
            y_BHWC = self.synthesis.synthesise(coefficient_lRD).to(x_BHWC.dtype)
        return y_BHWC if changes_grid else x_BHWC + y_BHWC

    def _build_matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the real matrix (l, D, D) of each degree that multiplies rows of real and imaginary parts."""
        real_lCC, imaginary_lCC = self.weight.to(dtype).unbind(-1)
        from_real = torch.cat((real_lCC, imaginary_lCC), dim=2)
        from_imaginary = torch.cat((-imaginary_lCC, real_lCC), dim=2)
        return torch.cat((from_real, from_imaginary), dim=1)
