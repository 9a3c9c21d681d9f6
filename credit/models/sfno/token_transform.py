"""Spherical-harmonic transform of the tokens of a network.

Shape suffixes: B batch, H and W rows and columns, C channels, 2 real and imaginary part, m orders, l degrees; R (order,
sample) pairs, which are the rows in the matrix product of the filter; D real and imaginary parts of all channels (2 C);
K (sample, part, channel) triples, which are the columns in the matrix product of the Legendre transform.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.grid import LatLonGrid
from credit.physics.legendre_tables import LegendreTables, find_tables


class TokenTransform:
    """Transform between tokens on a grid and their spherical-harmonic coefficients.

    The tables of the transform are constants that all blocks and networks of a process share. So the object is not a
    module, and its tables are not buffers. The network calls `load_tables` before it calls its blocks. Copies of the
    object share the tables.

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
        """Load the tables to the device of `x`, in float64 if `x` is float64, otherwise in float32."""
        self._tables = find_tables(self.grid, self.max_degree, x)

    def analyse(self, x_BHWC: Tensor) -> Tensor:
        """Return the spherical-harmonic coefficients (l, R, D) of tokens; they are 0 if the degree is below the order.

        The rows R are sorted by order, then by sample. The first half of D contains the real parts of all channels, the
        second half contains the imaginary parts.

        Args:
            x_BHWC: tokens, of the dtype of the tables.
        """
        num_samples = x_BHWC.shape[0]
        # Orders above `max_degree` are dropped.
        waves_mHB2C = _AnalyseRows.apply(x_BHWC, self.max_degree + 1).permute(2, 1, 0, 4, 3)
        # For each order, one matrix product computes the coefficients of all samples, parts and channels.
        coefficient_mlK = self._tables.analysis_mlH @ waves_mHB2C.flatten(2)
        coefficient_mlBD = coefficient_mlK.unflatten(2, (num_samples, -1))
        return coefficient_mlBD.transpose(0, 1).flatten(1, 2)

    def synthesise(self, coefficient_lRD: Tensor) -> Tensor:
        """Return the tokens (B, H, W, C) that have the given coefficients; the inverse of `analyse`.

        Args:
            coefficient_lRD: coefficients, in the same order as in the result of `analyse`.
        """
        coefficient_lmBD = coefficient_lRD.unflatten(1, (self.max_degree + 1, -1))
        num_samples = coefficient_lmBD.shape[2]
        waves_mHK = self._tables.synthesis_mHl @ coefficient_lmBD.flatten(2).transpose(0, 1)
        waves_mHB2C = waves_mHK.unflatten(2, (num_samples, 2, -1))
        return _SynthesiseRows.apply(waves_mHB2C.permute(2, 1, 0, 4, 3), self._num_columns)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenTransform:
        """Return a copy that shares the tables, because the tables may take up gigabytes on a fine grid."""
        return copy.copy(self)


def _sum_waves(waves_BHmC2: Tensor, num_columns: int) -> Tensor:
    """Return the real fields (B, H, W, C): a_0 plus the sum of 2 Re(a_m exp(i m lon)) over the orders m > 0.

    Args:
        waves_BHmC2: amplitude a_m of each wave. The imaginary part of order 0 has no effect.
        num_columns: number of columns W, more than twice the largest order.
    """
    waves_BHmC2 = waves_BHmC2.contiguous()
    # Set the imaginary part of order 0 to zero, because some FFT libraries ignore it and others do not.
    waves_BHmC2[:, :, 0, :, 1] = 0
    return torch.fft.irfft(torch.view_as_complex(waves_BHmC2), n=num_columns, dim=2, norm="forward")


class _AnalyseRows(torch.autograd.Function):
    """Autograd function from real fields (B, H, W, C) to the amplitudes of the waves in each row (B, H, m, C, 2).

    The backward pass of torch for this transform is complex. It takes twice the memory and time of a real transform.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x_BHWC: Tensor, num_orders: int) -> Tensor:
        ctx.num_columns = x_BHWC.shape[2]
        # `norm="forward"` divides by the number of columns.
        waves_BHmC = torch.fft.rfft(x_BHWC, dim=2, norm="forward")[:, :, :num_orders]
        return torch.view_as_real(waves_BHmC)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient_BHmC2: Tensor) -> tuple[Tensor, None]:
        # The derivative of the amplitude of order m is exp(-i m lon) / W. `_sum_waves` doubles orders above 0.
        halves_BHmC2 = gradient_BHmC2 * (0.5 / ctx.num_columns)
        halves_BHmC2[:, :, 0] *= 2
        return _sum_waves(halves_BHmC2, ctx.num_columns), None


class _SynthesiseRows(torch.autograd.Function):
    """Autograd function from the amplitudes of waves (B, H, m, C, 2) to real fields (B, H, W, C), see `_sum_waves`."""

    @staticmethod
    def forward(ctx: FunctionCtx, waves_BHmC2: Tensor, num_columns: int) -> Tensor:
        ctx.num_orders = waves_BHmC2.shape[2]
        return _sum_waves(waves_BHmC2.clone(memory_format=torch.contiguous_format), num_columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient_BHWC: Tensor) -> tuple[Tensor, None]:
        waves_BHmC = torch.fft.rfft(gradient_BHWC, dim=2)[:, :, : ctx.num_orders]
        # `_sum_waves` doubles orders above 0. The imaginary part of order 0 of a real field is 0.
        gradient_BHmC2 = torch.view_as_real(waves_BHmC) * 2
        gradient_BHmC2[:, :, 0] *= 0.5
        return gradient_BHmC2, None
