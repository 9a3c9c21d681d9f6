"""Gather of the patches of a padded field (space-to-depth), for convolutions with large kernels.

A patch is a square of stride x stride cells. Each cell of each patch is looked up in the field by an index, so the
padded field is never formed.

Shape suffixes: B batch, C channels, H and W rows and columns of cells or of patches, K channels of a patch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from credit.models.layers.padding import SpherePadding


@dataclass(frozen=True)
class PatchGrid:
    """Patches of a padded field, with patches of zeros around it for kernels that are centred on a patch.

    Attributes:
        stride: edge of a patch in cells.
        largest_kernel: edge of the largest kernel in cells.
        field_shape: rows and columns of the field.
        padding: padding of the field.
    """

    stride: int
    largest_kernel: int
    field_shape: tuple[int, int]
    padding: SpherePadding

    @property
    def output_shape(self) -> tuple[int, int]:
        """Rows and columns of patches that have an output."""
        height, width = self.padding.padded_shape(self.field_shape)
        return height // self.stride, width // self.stride

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of patches, those around the field included."""
        num_around = self.largest_kernel // self.stride - 1
        height, width = self.output_shape
        return height + num_around, width + num_around

    def first_patch(self, kernel: int) -> int:
        """Return the first row (and column) of patches that a kernel of this size reads."""
        return (self.largest_kernel - kernel) // 2 // self.stride

    def gather_index(self, device: torch.device) -> Tensor:
        """Return for each cell of the patches, in their order, the number of its cell in the field; 0 outside."""
        H, W = self.field_shape
        cell_numbers = torch.arange(H * W, dtype=torch.int32, device=device).view(1, 1, H, W)
        # Numbers of cells have no direction that could point the other way beyond a pole.
        padding = replace(self.padding, vector_channels=())
        padded_height, padded_width = self.padding.padded_shape(self.field_shape)
        rows, columns = (num_patches * self.stride for num_patches in self.shape)
        before = self._cells_before
        zeros_around = (before, columns - padded_width - before, before, rows - padded_height - before)
        numbers = F.pad(padding.pad(cell_numbers), zeros_around)
        return numbers.view(rows // self.stride, self.stride, -1, self.stride).transpose(1, 2).flatten()

    def unfold(self, x_BHWC: Tensor, gather_index: Tensor) -> Tensor:
        """Return the patches (B, *shape, stride^2 * C) of a field; channels are ordered (row, column, C)."""
        B, H, W, C = x_BHWC.shape
        cells = F.embedding(_index_of_samples(gather_index, B, H * W), x_BHWC.reshape(-1, C))
        return self._correct_(cells.view(B, *self.shape, -1), C)

    def fold(self, patches_BHWK: Tensor, gather_index: Tensor, channels: int) -> Tensor:
        """Return the transpose of `unfold`: for each cell the sum (B, H, W, C) over its copies.

        Args:
            patches_BHWK: patches; they are overwritten.
            gather_index: as for `unfold`.
            channels: channels of the field.
        """
        B = len(patches_BHWK)
        H, W = self.field_shape
        cells = self._correct_(patches_BHWK, channels).view(-1, channels)
        index = _index_of_samples(gather_index, B, H * W).flatten()
        return torch.ops.aten.embedding_dense_backward(cells, index, B * H * W, -1, False).view(B, H, W, channels)

    @property
    def _cells_before(self) -> int:
        """Cells from the edge of the first patch to the edge of the padded field."""
        return (self.largest_kernel - self.stride) // 2

    def _correct_(self, patches_BHWK: Tensor, channels: int) -> Tensor:
        """Set cells outside of the padded field to zero, and turn vectors beyond a pole, in place.

        A lookup cannot express these two.
        """
        stride = self.stride
        before = self._cells_before
        cells = patches_BHWK.unflatten(-1, (stride, stride, channels))
        for rows in self.padding.rows_across_pole(self.field_shape[0]):
            for patch_rows, row in self._lines(before + rows.start, before + rows.stop):
                for vector_channels in self.padding.vector_slices():
                    cells[:, patch_rows, :, row, :, vector_channels].neg_()
        for dim, padded_size in enumerate(self.padding.padded_shape(self.field_shape), start=1):
            end = self.shape[dim - 1] * stride
            for zeros in ((0, before), (min(before + padded_size, end), end)):
                for patch_lines, line in self._lines(*zeros):
                    num_patches = patch_lines.stop - patch_lines.start
                    cells.narrow(dim, patch_lines.start, num_patches).select(dim + 2, line).zero_()
        return patches_BHWK

    def _lines(self, start: int, stop: int) -> Iterator[tuple[slice, int]]:
        """Yield the patches that have a cell of the rows (or columns) `start` to `stop`, and its row in the patch."""
        for line in range(self.stride):
            first_patch = -(-(start - line) // self.stride)
            end_patch = -(-(stop - line) // self.stride)
            if first_patch < end_patch:
                yield slice(first_patch, end_patch), line


def _index_of_samples(gather_index: Tensor, num_samples: int, cells_per_sample: int) -> Tensor:
    """Return the index (num_samples, cells of patches) into the cells of several fields one after another."""
    samples = torch.arange(num_samples, dtype=gather_index.dtype, device=gather_index.device)
    return gather_index + cells_per_sample * samples[:, None]
