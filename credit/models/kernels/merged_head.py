"""The decoder's last block, from the first stage's cells to four times as many; it computes the wanted cells alone.

Shape suffixes: B batch, C channels, H and W rows and columns. A margin is the number of output rows or columns that
are not wanted at the beginning, and at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.models.kernels.autocast import without_autocast
from credit.models.kernels.dispatch import use_cpu_kernels
from credit.models.layers.pixel_shuffle import SubpixelConv

# cells around those that are kept whose values the head reads: two 3x3 convolutions, one of them at twice the cells
HALO = 2
# rows of a channels-last field that a CPU's cache holds while they are written channel by channel
BAND = 4
Margins = Sequence[tuple[int, int]]
WHOLE: Margins = ((0, 0), (0, 0))


def crop_window(size: int, before: int, after: int) -> tuple[slice, slice]:
    """Return which of `size` cells the head is given, and what is kept of the cells, twice as many, that it makes.

    Args:
        size: rows or columns of the head's input.
        before: rows or columns of its whole output that are not wanted at the beginning.
        after: those at the end.
    """
    first, last = max(before // 2 - HALO, 0), min(size - after // 2 + HALO, size)
    return slice(first, last), slice(before - 2 * first, 2 * (size - first) - after)


def _given_and_kept(x_BCHW: Tensor, margins: Margins) -> tuple[Tensor, tuple[slice, slice]]:
    windows = [crop_window(n, *margin) for n, margin in zip(x_BCHW.shape[2:], margins, strict=True)]
    (rows, kept_rows), (columns, kept_columns) = windows
    return x_BCHW[..., rows, columns], (kept_rows, kept_columns)


class TransposedHead(nn.ConvTranspose2d):
    """Transposed convolution that doubles height and width."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 4, stride=2, padding=1)

    def forward(self, x_BCHW: Tensor, margins: Margins = WHOLE) -> Tensor:
        """Return (B, out_channels, 2H, 2W), less the margins of rows and columns."""
        x_BCHW, (rows, columns) = _given_and_kept(x_BCHW, margins)
        return super().forward(x_BCHW)[..., rows, columns]


@dataclass(frozen=True)
class OutputWindow:
    """The wanted rows (or columns) of the output, and where a merged kernel finds them.

    Output row r = 2i + a of phase a comes from position p = i + a, which reads the input rows p - 2 to p + 1.

    Attributes:
        size: input rows.
        first: first wanted output row.
        end: the row after the last.
    """

    size: int
    first: int
    end: int

    @property
    def positions(self) -> int:
        """Number of positions that have a wanted row."""
        return self.end // 2 - self._first_position + 1

    @property
    def pads(self) -> tuple[int, int]:
        """Rows of zeros before and after the input, negative where its rows are not read."""
        return 2 - self._first_position, self._first_position + self.positions + 1 - self.size

    @property
    def _first_position(self) -> int:
        return (self.first + 1) // 2

    def phase(self, a: int) -> tuple[slice, slice]:
        """Return which of the wanted rows are of phase `a`, and their positions."""
        row = self.first + (self.first + a) % 2
        position = (row + 1) // 2 - self._first_position
        return slice(row - self.first, None, 2), slice(position, position + (self.end - row + 1) // 2)


class SubpixelHead(nn.Sequential):
    """Subpixel convolution and a 3x3 convolution of its result.

    Nothing lies between the two, so together they are one 4x4 convolution for each of the four cells that an input cell
    becomes. That is computed where it takes fewer operations, which wide outputs make it do.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(SubpixelConv(in_channels, out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1))

    def forward(self, x_BCHW: Tensor, margins: Margins = WHOLE) -> Tensor:
        """Return (B, out_channels, 2H, 2W), less the margins of rows and columns."""
        spans = [
            OutputWindow(n, before, 2 * n - after) for n, (before, after) in zip(x_BCHW.shape[2:], margins, strict=True)
        ]
        if self._merging_pays(x_BCHW, margins, spans):
            weight, bias = (self.merged_weight, self.merged_bias) if hasattr(self, "merged_weight") else self._merged()
            rows, columns = spans
            y_BCHW = F.conv2d(F.pad(x_BCHW, (*columns.pads, *rows.pads)), weight, bias)
            return _Interleave.apply(y_BCHW, rows, columns)
        x_BCHW, (rows, columns) = _given_and_kept(x_BCHW, margins)
        return super().forward(x_BCHW)[..., rows, columns]

    def make_once(self) -> None:
        """Make the merged kernels once, for weights that do not change any more."""
        with torch.no_grad():
            weight, bias = self._merged()
        self.register_buffer("merged_weight", weight, persistent=False)
        self.register_buffer("merged_bias", bias, persistent=False)

    def _merged(self) -> tuple[Tensor, Tensor]:
        return merged(self[0].weight, self[0].bias, self[1].weight, self[1].bias)

    def _merging_pays(self, x_BCHW: Tensor, margins: Margins, spans: Sequence[OutputWindow]) -> bool:
        """Whether merged kernels are right here and take fewer products, their making included.

        At the field's edge they are not the same: there the second convolution reads zeros, not the first one's values.
        """
        if min(itertools.chain(*margins)) < 1:
            return False
        inner, outer = self[0].in_channels, self[1].out_channels
        given, _ = _given_and_kept(x_BCHW, margins)
        # of one sample, so that a forecast does not depend on those beside it
        apart = given.shape[2] * given.shape[3] * 36 * outer * (inner + outer)
        together = spans[0].positions * spans[1].positions * 64 * inner * outer
        return together + 64 * inner * 9 * outer**2 < apart


def merged(first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a convolution that does what a subpixel convolution and another one do.

    Args:
        first: weight of the subpixel convolution (4 C, in, 3, 3), outputs ordered (C, row phase, column phase).
        first_bias: (4 C,).
        second: weight (out, C, 3, 3).
        second_bias: (out,).

    Returns:
        (4 out, in, 4, 4) and (4 out,), ordered (row phase, column phase, out); for positions as in `OutputWindow`.
    """
    inner, channels = first.shape[1], second.shape[1]
    dtype, wide = first.dtype, torch.promote_types(first.dtype, torch.float32)
    with without_autocast(first):
        second = second.to(wide)
        # Output row 2i + t that input row i reaches, t from -2: tap m of phase a is t = a - 2 m. Hence a kernel of six.
        reach = first.to(wide).flip(2, 3).unflatten(0, (channels, 2, 2)).permute(3, 0, 4, 1, 5, 2)
        reach = F.conv2d(reach.reshape(inner, channels, 6, 6), second, padding=2)  # t from -3 to 4
        weight = reach.flip(2, 3).unflatten(3, (4, 2)).unflatten(2, (4, 2)).permute(3, 5, 1, 0, 2, 4)
        # phases 0, 1, 0, 1: a 3x3 kernel's middle lies on 1 first, then on 0
        bias = F.conv2d(first_bias.to(wide).view(1, channels, 2, 2).repeat(1, 1, 2, 2), second)
        bias = bias[0].flip(1, 2).permute(1, 2, 0) + second_bias.to(wide)
    return weight.flatten(0, 2).to(dtype), bias.flatten().to(dtype)


class _Interleave(torch.autograd.Function):
    """Put the four cells that each position stands for into their places, (B, C, rows, columns)."""

    @staticmethod
    def forward(ctx: FunctionCtx, y_BCHW: Tensor, rows: OutputWindow, columns: OutputWindow) -> Tensor:
        ctx.spans, ctx.shape = (rows, columns), y_BCHW.shape
        B, C = y_BCHW.shape[:2]
        x_BCHW = y_BCHW.new_empty(B, C // 4, rows.end - rows.first, columns.end - columns.first)
        for cells, places in _phases(x_BCHW, y_BCHW, rows, columns):
            count = BAND if use_cpu_kernels(y_BCHW) else cells.shape[2]
            for cells_band, places_band in zip(cells.split(count, 2), places.split(count, 2), strict=True):
                cells_band.copy_(places_band)
        return x_BCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        of_y = torch.empty(ctx.shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
        of_y.zero_()
        for cells, places in _phases(gradient, of_y, *ctx.spans):
            places.copy_(cells)
        return of_y, None, None


def _phases(
    x_BCHW: Tensor, y_BCHW: Tensor, rows: OutputWindow, columns: OutputWindow
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each phase, the cells of `x_BCHW` and where they are in `y_BCHW`, views of one shape."""
    for (a, b), part in zip(itertools.product(range(2), repeat=2), y_BCHW.chunk(4, dim=1), strict=True):
        (r, p), (c, q) = rows.phase(a), columns.phase(b)
        yield x_BCHW[..., r, c], part[..., p, q]
