"""Convolutions over rows of patches, and the gradients of their weights, by a fast FIR algorithm where it suits.

The sums y[n] = h[0] x[n] + h[1] x[n + 1] + ... with an even number of taps h are a finite impulse response (FIR)
filter. With e and o for the elements of even and odd number, and * for such sums,

    y_e = (h_e + h_o) * x_o + h_e * (x_e - x_o)
    y_o = (h_e + h_o) * x_o + h_o * (x_e[1:] - x_o)

Three sums of half the length for half the rows are a quarter less work than two of the whole length for half the rows
(Mou and Duhamel 1991, IEEE Trans. Signal Process. 39, 1322). In bfloat16 the differences would be rounded once more.

Shape suffixes: B batch, C channels, H and W rows and columns of patches, K channels of a patch, N patches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from credit.models.kernels.dispatch import FAST_FIR, uses
from credit.models.kernels.patch_gather import PatchGrid


class PatchRows:
    """Rows of patches that kernels of several sizes are convolved with.

    Args:
        grid: geometry of the patches.
        patches_BHWK: patches.
    """

    def __init__(self, grid: PatchGrid, patches_BHWK: Tensor) -> None:
        self._grid = grid
        self._patches = patches_BHWK
        self._fir_rows: tuple[Tensor, Tensor, Tensor] | None = None

    def slab(self, taps: int) -> Tensor:
        """Return the rows of patches that a kernel with this number of row taps reads."""
        first_row = self._grid.first_patch(taps * self._grid.stride)
        return self._patches[:, first_row : first_row + self._grid.output_shape[0] + taps - 1]

    def convolve(self, row_weight: Tensor) -> Tensor:
        """Return the convolution (B, output rows, W, out), contiguous, with a weight (out, K, taps, 1)."""
        taps = row_weight.shape[2]
        if not self._suits_fast_fir(taps):
            return _convolve_rows(self.slab(taps), row_weight)
        odd, even_minus_odd, next_even_minus_odd = self._fir_slabs(taps)
        even_taps = row_weight[:, :, ::2]
        odd_taps = row_weight[:, :, 1::2]
        shared_BHWC = _convolve_rows(odd, even_taps + odd_taps)
        B, _, W, C = shared_BHWC.shape
        y_BHWC = shared_BHWC.new_empty(B, self._grid.output_shape[0], W, C)
        even_rows = _convolve_rows(even_minus_odd, even_taps)
        y_BHWC[:, ::2] = even_rows.add_(shared_BHWC)
        odd_rows = _convolve_rows(next_even_minus_odd, odd_taps)
        y_BHWC[:, 1::2] = odd_rows.add_(shared_BHWC[:, : odd_rows.shape[1]])
        return y_BHWC

    def weight_gradient(self, grad_y_BHWC: Tensor, taps: int) -> Tensor:
        """Return the gradient (out, K, taps, 1) of the weight, float32, given that of `convolve`."""
        if not self._suits_fast_fir(taps):
            tap_gradients = _tap_gradients(grad_y_BHWC, self.slab(taps), taps)
            return torch.stack(tap_gradients, dim=-1).unsqueeze(-1)
        odd, even_minus_odd, next_even_minus_odd = self._fir_slabs(taps)
        grad_even = grad_y_BHWC[:, ::2]
        grad_odd = grad_y_BHWC[:, 1::2]
        grad_shared = grad_even.clone()
        grad_shared[:, : grad_odd.shape[1]] += grad_odd
        shared_gradients = _tap_gradients(grad_shared, odd, taps // 2)
        even_gradients = _tap_gradients(grad_even, even_minus_odd, taps // 2)
        odd_gradients = _tap_gradients(grad_odd, next_even_minus_odd, taps // 2)
        tap_gradients = []
        for shared, even, odd_ in zip(shared_gradients, even_gradients, odd_gradients, strict=True):
            tap_gradients += [shared + even, shared + odd_]
        return torch.stack(tap_gradients, dim=-1).unsqueeze(-1)

    def _suits_fast_fir(self, taps: int) -> bool:
        first_row = self._grid.first_patch(taps * self._grid.stride)
        has_pairs = first_row % 2 == 0 and taps % 2 == 0 and self._grid.output_shape[0] >= 2
        return has_pairs and uses(FAST_FIR, self._patches)

    def _fir_slabs(self, taps: int) -> list[Tensor]:
        """Return x_o, x_e - x_o and x_e[1:] - x_o of the rows that a kernel reads."""
        if self._fir_rows is None:
            self._fir_rows = _fir_rows(self._patches)
        first_pair = self._grid.first_patch(taps * self._grid.stride) // 2
        num_rows = self._grid.output_shape[0]
        num_even = (num_rows + 1) // 2
        num_odd = num_rows // 2
        slabs = []
        for rows, num_outputs in zip(self._fir_rows, (num_even, num_even, num_odd), strict=True):
            slabs.append(rows[:, first_pair : first_pair + num_outputs + taps // 2 - 1])
        return slabs


def _fir_rows(patches_BHWK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x_o, x_e - x_o and x_e[1:] - x_o, each of half as many rows."""
    even = patches_BHWK[:, ::2]
    odd = patches_BHWK[:, 1::2].contiguous()
    num_odd = odd.shape[1]
    return odd, even[:, :num_odd] - odd, even[:, 1:] - odd[:, : even.shape[1] - 1]


def _convolve_rows(rows_BHWK: Tensor, row_weight: Tensor) -> Tensor:
    y_BCHW = F.conv2d(rows_BHWK.permute(0, 3, 1, 2), row_weight)
    return y_BCHW.permute(0, 2, 3, 1).contiguous()


def _tap_gradients(grad_y_BHWC: Tensor, rows_BHWK: Tensor, taps: int) -> list[Tensor]:
    """Return the gradient (C, K) of each row tap, float32, each by a product of matrices.

    That is faster than the weight gradient of a convolution, twice for 16 taps in float32 on a CPU (torch 2.13).
    """
    num_rows = grad_y_BHWC.shape[1]
    # Contiguous as it is multiplied, or each product in bfloat16 would copy it.
    grad_y_BCN = grad_y_BHWC.flatten(1, 2).transpose(1, 2).contiguous()
    gradients = []
    for tap in range(taps):
        tap_rows_BNK = rows_BHWK[:, tap : tap + num_rows].flatten(1, 2)
        gradients.append((grad_y_BCN @ tap_rows_BNK).float().sum(0))
    return gradients
