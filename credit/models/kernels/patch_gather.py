"""A field cut into blocks of stride x stride cells, for convolutions with large kernels.

Shape suffixes: B batch, C channels, H and W rows and columns; N blocks of stride x stride cells, K their channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from credit.models.layers.padding import SpherePadding


@dataclass(frozen=True)
class PatchGrid:
    """The blocks of a padded field, with zeros around for kernels that are centred on them.

    Which cell of the field a block's cell holds is looked up, so that a padded field is never made.

    Attributes:
        stride: edge of a block in cells.
        widest: edge of the largest kernel in cells.
        field: rows and columns of the field.
        padding: of the field.
    """

    stride: int
    widest: int
    field: tuple[int, int]
    padding: SpherePadding

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of blocks that have an output."""
        rows, columns = (n // self.stride for n in self.padding.padded(self.field))
        return rows, columns

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of blocks, those around the field included."""
        rows, columns = (n + self.widest // self.stride - 1 for n in self.size)
        return rows, columns

    def first(self, kernel: int) -> int:
        """Return the first row and column of blocks that a smaller kernel reads."""
        return (self.widest - kernel) // 2 // self.stride

    def places(self, device: torch.device) -> Tensor:
        """Return for each cell of the blocks, in their order, the number of the field's cell; 0 outside of it."""
        H, W = self.field
        cells = torch.arange(H * W, dtype=torch.int32, device=device).view(1, 1, H, W)
        rows, columns = (n * self.stride for n in self.blocks)
        height, width = self.padding.padded(self.field)
        around = (self._before, columns - width - self._before, self._before, rows - height - self._before)
        padding = replace(self.padding, vector_runs=())  # of the numbers
        padded = F.pad(padding.pad(cells), around).view(rows // self.stride, self.stride, -1, self.stride)
        return padded.transpose(1, 2).flatten()

    def cut(self, x_BHWC: Tensor, places: Tensor) -> Tensor:
        """Return the blocks (B, *blocks, stride^2 C) of a field, their channels ordered (row, column, C)."""
        B, H, W, C = x_BHWC.shape
        cells = F.embedding(_of_samples(places, B, H * W), x_BHWC.reshape(-1, C))
        return self._correct(cells.view(B, *self.blocks, -1), C)

    def join(self, blocks_BHWK: Tensor, places: Tensor, channels: int) -> Tensor:
        """Return the transpose of `cut`, the sums (B, H, W, C) of what lies in the copies of each cell; takes blocks
        that may be written to.
        """
        B, (H, W) = len(blocks_BHWK), self.field
        cells = self._correct(blocks_BHWK, channels).view(-1, channels)
        index = _of_samples(places, B, H * W).flatten()
        return torch.ops.aten.embedding_dense_backward(cells, index, B * H * W, -1, False).view(B, H, W, channels)

    @property
    def _before(self) -> int:
        """Cells from the first block's edge to the padded field's."""
        return (self.widest - self.stride) // 2

    def _correct(self, blocks_BHWK: Tensor, channels: int) -> Tensor:
        """Set the cells outside of the padded field to zero, and turn vectors beyond a pole, in place."""
        stride, before = self.stride, self._before
        cells = blocks_BHWK.unflatten(-1, (stride, stride, channels))
        height, width = self.padding.padded(self.field)
        for beyond in self.padding.beyond_poles(self.field[0]):
            for blocks, row in self._lines(before + beyond.start, before + beyond.stop):
                for run in self.padding.vector_runs:
                    cells[:, blocks, :, row, :, run].neg_()
        for dim, length in ((1, height), (2, width)):
            last = self.blocks[dim - 1] * stride
            for start, stop in ((0, before), (min(before + length, last), last)):
                for blocks, line in self._lines(start, stop):
                    cells.narrow(dim, blocks.start, blocks.stop - blocks.start).select(dim + 2, line).zero_()
        return blocks_BHWK

    def _lines(self, start: int, stop: int) -> Iterator[tuple[slice, int]]:
        """Yield which blocks have a cell of the lines `start` to `stop`, and where in the block it is."""
        for line in range(self.stride):
            first, end = (-(-(n - line) // self.stride) for n in (start, stop))
            if first < end:
                yield slice(first, end), line


def _of_samples(places: Tensor, count: int, cells: int) -> Tensor:
    """Return the places in each of `count` fields of so many cells that lie one after another, (count, places)."""
    return places + cells * torch.arange(count, dtype=places.dtype, device=places.device)[:, None]


def fast_fir_rows(blocks_BHWK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what convolutions over rows are made of by a fast FIR algorithm, three fields of half as many rows.

    The sums y[n] = h[0] x[n] + h[1] x[n + 1] + ... with an even number of taps are, with e and o for what has an even
    and an odd number, and * for such sums,

        y_e = (h_e + h_o) * x_o + h_e * (x_e - x_o)
        y_o = (h_e + h_o) * x_o + h_o * (x_e[1:] - x_o)

    Three sums of half the length for half the rows are a quarter less than two of the whole length for half the rows
    (Mou and Duhamel 1991, IEEE Trans. Signal Process. 39, 1322).

    Returns:
        x_o, x_e - x_o and x_e[1:] - x_o.
    """
    even, odd = blocks_BHWK[:, ::2], blocks_BHWK[:, 1::2].contiguous()
    count = odd.shape[1]
    return odd, even[:, :count] - odd, even[:, 1:] - odd[:, : even.shape[1] - 1]
