"""Kernel that merges the two convolutions of the head of a decoder, and computes the result only at needed cells.

The head is a subpixel convolution, which turns each cell into 2 x 2 cells, and a 3x3 convolution. The plain formulation
runs the two layers one after the other. The head is linear, so each of the four phases of the output (even or odd row,
even or odd column) is a 4x4 convolution of the input. The kernel computes all four phases as one convolution with four
times as many outputs, and then interleaves them with an offset that depends on the phase.

For each cell of the input, the merged convolution needs 64 products for each pair of an input and an output channel.
The two layers need 36 products for each pair of an input and an output channel, and 36 products for each pair of two
output channels.

Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.models.kernels.autocast import without_autocast
from credit.models.kernels.dispatch import MERGED_HEAD, uses_kernel

# Numbers of output rows to crop at (north, south) and of output columns to crop at (west, east).
Margins = Sequence[tuple[int, int]]
NO_MARGINS: Margins = ((0, 0), (0, 0))
# Number of input cells that the head reads beyond the needed cells. Two 3x3 convolutions, the second at twice the
# resolution, read 1.5 cells beyond them, rounded up.
HALO = 2


def crop_input(x_BCHW: Tensor, margins: Margins) -> tuple[Tensor, slice, slice]:
    """Crop the input of a head to the cells on which the needed part of its output depends.

    The head doubles height and width.

    Args:
        x_BCHW: (B, C, H, W) input of the head.
        margins: output rows at (north, south) and columns at (west, east) that are not needed.

    Returns:
        The cropped input (B, C, h, w), and the slices of the needed rows and columns in the output (2h, 2w) of the
        head.
    """
    input_slices = []
    output_slices = []
    for size, (before, after) in zip(x_BCHW.shape[2:], margins, strict=True):
        start = max(before // 2 - HALO, 0)
        end = min(size - after // 2 + HALO, size)
        input_slices.append(slice(start, end))
        # Row 0 of the output for the cropped input is row 2 * start of the complete output.
        output_slices.append(slice(before - 2 * start, 2 * (size - start) - after))
    rows, columns = input_slices
    return x_BCHW[..., rows, columns], *output_slices


@dataclass(frozen=True)
class OutputWindow:
    """Range of needed output rows (or columns), and the rows of the merged convolution that contain them.

    The head doubles the number of rows. Row p of the merged convolution, here called position p, reads the input rows
    p - 2 to p + 1 and contains the output rows 2p - 1 and 2p. So output row r is at position (r + 1) // 2.

    Attributes:
        size: number of input rows.
        start: index of the first needed output row.
        end: index of the last needed output row, plus 1.
    """

    size: int
    start: int
    end: int

    @property
    def first_position(self) -> int:
        """Position at which the first needed row is computed."""
        return (self.start + 1) // 2

    @property
    def num_positions(self) -> int:
        """Number of positions at which a needed row is computed."""
        # The last needed row, end - 1, has position end // 2.
        return self.end // 2 - self.first_position + 1

    @property
    def pads(self) -> tuple[int, int]:
        """Numbers of rows of zeros to pad before and after the input; negative where rows of the input are cropped."""
        # The first position also reads the two previous rows. The last position p reads row p + 1; the last row is
        # size - 1.
        end_position = self.first_position + self.num_positions
        return 2 - self.first_position, end_position + 1 - self.size

    def phase_slices(self, phase: int) -> tuple[slice, slice]:
        """Return the slice of the needed output rows of one phase, and the slice of the positions of these rows.

        The row indices count from `start`, and the position indices count from `first_position`.

        Args:
            phase: 0 for even output rows, 1 for odd rows.
        """
        # `row` is the first needed row of the phase. From this row on, every second row has the same phase.
        row = self.start + (self.start + phase) % 2
        position = (row + 1) // 2 - self.first_position
        num_rows = (self.end - row + 1) // 2
        return slice(row - self.start, None, 2), slice(position, position + num_rows)


def find_output_windows(x_BCHW: Tensor, margins: Margins) -> tuple[OutputWindow, OutputWindow]:
    """Return the window of needed output rows and the window of needed output columns.

    Args:
        x_BCHW: input of the head.
        margins: output rows at (north, south) and columns at (west, east) that are not needed.
    """
    height, width = x_BCHW.shape[2:]
    (north, south), (west, east) = margins
    return OutputWindow(height, north, 2 * height - south), OutputWindow(width, west, 2 * width - east)


def is_merging_worthwhile(x_BCHW: Tensor, margins: Margins, out_channels: int) -> bool:
    """Return True if the merged convolution is exact and needs fewer products than the two layers.

    The number of products includes those that merge the kernels. The merged convolution is not exact at the edge of the
    field: the second layer reads zeros beyond the edge, but the merged convolution reads values that the first layer
    would compute there. So every margin must be at least 1.

    Args:
        x_BCHW: input of the head.
        margins: output rows at (north, south) and columns at (west, east) that are not needed.
        out_channels: number of channels of the output.
    """
    smallest_margin = min(itertools.chain(*margins))
    if smallest_margin < 1 or not uses_kernel(MERGED_HEAD, x_BCHW):
        return False
    in_channels = x_BCHW.shape[1]
    cropped_BCHW, _, _ = crop_input(x_BCHW, margins)
    # Count the products of one sample, so that the choice (and the rounding) does not depend on the batch size.
    num_cells = cropped_BCHW.shape[2] * cropped_BCHW.shape[3]
    # Each input cell becomes 4 output cells. Each layer reads 9 cells per output cell, the merged convolution 16.
    plain_products = num_cells * 36 * out_channels * (in_channels + out_channels)
    rows, columns = find_output_windows(x_BCHW, margins)
    merged_products = rows.num_positions * columns.num_positions * 64 * in_channels * out_channels
    # `merge_kernels` applies the second layer, with 9 taps, to the 8 x 8 output cells that depend on an input cell.
    products_to_merge = 64 * in_channels * 9 * out_channels**2
    return merged_products + products_to_merge < plain_products


def merged_head(x_BCHW: Tensor, weight: Tensor, bias: Tensor, margins: Margins) -> Tensor:
    """Return the output of the two convolutions without the margins.

    Args:
        x_BCHW: (B, in, H, W) input of the head.
        weight: merged weight from `merge_kernels`.
        bias: merged bias from `merge_kernels`.
        margins: output rows at (north, south) and columns at (west, east) to crop, at least one on each side.

    Returns:
        Output (B, out, 2H - cropped rows, 2W - cropped columns), contiguous.
    """
    rows, columns = find_output_windows(x_BCHW, margins)
    phases_BCHW = F.conv2d(F.pad(x_BCHW, (*columns.pads, *rows.pads)), weight, bias)
    return _Interleave.apply(phases_BCHW, rows, columns)


def merge_kernels(
    subpixel_weight: Tensor, subpixel_bias: Tensor, conv_weight: Tensor, conv_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a convolution that replaces a subpixel convolution and the following 3x3 convolution.

    Args:
        subpixel_weight: (4 * C, in, 3, 3), with outputs ordered (C, row phase, column phase).
        subpixel_bias: (4 * C,).
        conv_weight: (out, C, 3, 3), where C is the number of channels between the two convolutions.
        conv_bias: (out,).

    Returns:
        Weight (4 * out, in, 4, 4) and bias (4 * out,) in the dtype of `subpixel_weight`. Outputs are ordered (row
        phase, column phase, out), and have the positions that `OutputWindow` describes.
    """
    in_channels = subpixel_weight.shape[1]
    channels = conv_weight.shape[1]
    dtype = subpixel_weight.dtype
    # The sums are computed in float32, so that merged kernels are rounded only once, like the weights.
    sum_dtype = torch.promote_types(dtype, torch.float32)
    with without_autocast(subpixel_weight):
        conv_weight = conv_weight.to(sum_dtype)
        # The output rows 2i + t of the subpixel convolution depend on input row i, where tap m of phase a has
        # t = a - 2m. The range of t is -2 to 3, so the kernel has six rows, and also six columns.
        reach = subpixel_weight.to(sum_dtype).flip(2, 3)
        # Permute (C, row phase, column phase, in, row tap, column tap)
        # to (in, C, row tap, row phase, column tap, column phase).
        reach = reach.unflatten(0, (channels, 2, 2)).permute(3, 0, 4, 1, 5, 2)
        reach = reach.reshape(in_channels, channels, 6, 6)
        # The second convolution extends the range of t to -3 to 4.
        reach = F.conv2d(reach, conv_weight, padding=2)
        # Permute (in, out, row tap, row phase, column tap, column phase)
        # to (row phase, column phase, out, in, row tap, column tap).
        weight = reach.flip(2, 3).unflatten(3, (4, 2)).unflatten(2, (4, 2))
        weight = weight.permute(3, 5, 1, 0, 2, 4)
        # The bias of the subpixel convolution repeats its phases 0, 1, 0, 1. The middle of the 3x3 kernel is first on
        # phase 1, then on phase 0, so the result is flipped.
        phase_bias = subpixel_bias.to(sum_dtype).view(1, channels, 2, 2).repeat(1, 1, 2, 2)
        bias = F.conv2d(phase_bias, conv_weight)
        # (out, row phase, column phase) becomes (row phase, column phase, out).
        bias = bias[0].flip(1, 2).permute(1, 2, 0) + conv_bias.to(sum_dtype)
    return weight.flatten(0, 2).to(dtype), bias.flatten().to(dtype)


class _Interleave(torch.autograd.Function):
    """Autograd function that interleaves the four phases of the merged convolution into rows and columns.

    The phases are groups of channels. The forward pass returns (B, C / 4, needed rows, needed columns).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, phases_BCHW: Tensor, rows: OutputWindow, columns: OutputWindow) -> Tensor:
        ctx.windows = (rows, columns)
        ctx.phases_shape = phases_BCHW.shape
        batch, channels = phases_BCHW.shape[:2]
        y_BCHW = phases_BCHW.new_empty(batch, channels // 4, rows.end - rows.start, columns.end - columns.start)
        for cells, positions in _iterate_phase_views(y_BCHW, phases_BCHW, rows, columns):
            cells.copy_(positions)
        return y_BCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y_BCHW: Tensor) -> tuple[Tensor, None, None]:
        grad_phases_BCHW = torch.empty(
            ctx.phases_shape,
            dtype=grad_y_BCHW.dtype,
            device=grad_y_BCHW.device,
            memory_format=torch.channels_last,
        )
        # At positions where a phase has no needed cell, the gradient is zero.
        grad_phases_BCHW.zero_()
        for cells, positions in _iterate_phase_views(grad_y_BCHW, grad_phases_BCHW, *ctx.windows):
            positions.copy_(cells)
        return grad_phases_BCHW, None, None


def _iterate_phase_views(
    y_BCHW: Tensor, phases_BCHW: Tensor, rows: OutputWindow, columns: OutputWindow
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two views of equal shape for each phase: the cells of the phase in `y_BCHW` and in `phases_BCHW`.

    Args:
        y_BCHW: output of the head.
        phases_BCHW: result of the merged convolution, with channels ordered (row phase, column phase, C).
        rows: window of the needed output rows.
        columns: window of the needed output columns.
    """
    phase_pairs = itertools.product(range(2), repeat=2)
    for (row_phase, column_phase), phase_BCHW in zip(phase_pairs, phases_BCHW.chunk(4, dim=1), strict=True):
        output_rows, row_positions = rows.phase_slices(row_phase)
        output_columns, column_positions = columns.phase_slices(column_phase)
        yield y_BCHW[..., output_rows, output_columns], phase_BCHW[..., row_positions, column_positions]
