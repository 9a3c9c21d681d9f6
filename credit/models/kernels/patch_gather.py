"""Operation that gathers the patches of a padded field (space-to-depth), for convolutions with large kernels.

A patch is a square of stride x stride cells. For each cell of each patch, an index contains the cell of the unpadded
field, so the padded field is never stored.

Shape suffixes: B batch, C channels, H and W rows and columns of cells or of patches, K channels of a patch
(stride * stride * C).
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
    """Geometry of the patches of a padded field, including patches of zeros around it that the outermost kernels read.

    Attributes:
        stride: edge of a patch in cells.
        largest_kernel: edge of the largest kernel in cells.
        field_shape: (rows, columns) of the field without padding.
        padding: padding of the field on the sphere.
        has_halo: True if the field already contains the surrounding cells that the largest kernel reads, so that no
            zeros are added.
    """

    stride: int
    largest_kernel: int
    field_shape: tuple[int, int]
    padding: SpherePadding
    has_halo: bool = False

    @property
    def output_shape(self) -> tuple[int, int]:
        """Number of rows and columns of the convolution output; each output cell is centred on one patch."""
        height, width = self.padding.padded_shape(self.field_shape)
        num_around = 0
        if self.has_halo:
            num_around = self.largest_kernel // self.stride - 1
        return height // self.stride - num_around, width // self.stride - num_around

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns of all patches, including patches of zeros around the padded field."""
        num_around = self.largest_kernel // self.stride - 1
        height, width = self.output_shape
        return height + num_around, width + num_around

    def first_patch(self, kernel: int) -> int:
        """Return the index of the first row (and column) of patches that a kernel of `kernel` x `kernel` cells reads.

        The index is 0 for the largest kernel. Smaller kernels do not read the outermost patches.
        """
        return (self.largest_kernel - kernel) // 2 // self.stride

    def gather_index(self, device: torch.device) -> Tensor:
        """Return the number of the field cell to copy into each cell of each patch.

        The number of a field cell is row * W + column. For cells outside of the padded field, the number is 0, and
        `unfold` sets these cells to zero. The result is one-dimensional, int32, and ordered (row of patches, column of
        patches, row in the patch, column in the patch).
        """
        H, W = self.field_shape
        cell_numbers = torch.arange(H * W, dtype=torch.int32, device=device).view(1, 1, H, W)
        # Cell indices are padded like a scalar field, which keeps its sign beyond a pole.
        padding = replace(self.padding, vector_channels=())
        padded_height, padded_width = self.padding.padded_shape(self.field_shape)
        # Size in cells of the area that all patches cover.
        rows = self.shape[0] * self.stride
        columns = self.shape[1] * self.stride
        before = self._cells_before
        zeros_around = (before, columns - padded_width - before, before, rows - padded_height - before)
        numbers = F.pad(padding.pad(cell_numbers), zeros_around)
        # The view is (row of patches, row in the patch, column of patches, column in the patch).
        return numbers.view(rows // self.stride, self.stride, -1, self.stride).transpose(1, 2).flatten()

    def unfold(self, x_BHWC: Tensor, gather_index: Tensor) -> Tensor:
        """Return the patches (B, *shape, stride^2 * C) of a field.

        The channels of a patch are ordered (row in the patch, column in the patch, C).

        Args:
            x_BHWC: field without its padding.
            gather_index: result of `gather_index`.
        """
        B, H, W, C = x_BHWC.shape
        # `embedding` copies rows of a table; here a row of the table is a cell with its C channels.
        cells = F.embedding(_repeat_gather_index(gather_index, B, H * W), x_BHWC.reshape(-1, C))
        return self._zero_outside_and_flip_signs_(cells.view(B, *self.shape, -1), C)

    def fold(self, patches_BHWK: Tensor, gather_index: Tensor, channels: int) -> Tensor:
        """Add all copies of each field cell in the patches, and return the sums (B, H, W, C).

        This is the transpose of `unfold`.

        Args:
            patches_BHWK: patches; the function overwrites them.
            gather_index: result of `gather_index`.
            channels: number of channels C of the field.
        """
        B = len(patches_BHWK)
        H, W = self.field_shape
        # Setting zeros and changing signs is a product with a diagonal matrix, which equals its transpose.
        cells = self._zero_outside_and_flip_signs_(patches_BHWK, channels).view(-1, channels)
        index = _repeat_gather_index(gather_index, B, H * W).flatten()
        # The gradient of an embedding with respect to its table is the sum over the copies. The last two arguments are
        # those of an embedding without padding index and without scaling.
        return torch.ops.aten.embedding_dense_backward(cells, index, B * H * W, -1, False).view(B, H, W, channels)

    @property
    def _cells_before(self) -> int:
        """Number of rows (and columns) of zeros before the padded field, from the edge of the first patch."""
        if self.has_halo:
            return 0
        return (self.largest_kernel - self.stride) // 2

    def _zero_outside_and_flip_signs_(self, patches_BHWK: Tensor, channels: int) -> Tensor:
        """Set cells outside of the padded field to zero, and change the sign of vectors beyond a pole, in place.

        `unfold` needs this step because a lookup by index only copies values.

        Args:
            patches_BHWK: patches, which the function changes and returns.
            channels: number of channels C of the field.
        """
        stride = self.stride
        before = self._cells_before
        # (B, row of patches, column of patches, row in the patch, column in the patch, C)
        cells = patches_BHWK.unflatten(-1, (stride, stride, channels))
        for rows in self.padding.find_rows_beyond_pole(self.field_shape[0]):
            for patch_rows, row in self._locate_lines(before + rows.start, before + rows.stop):
                for vector_channels in self.padding.find_vector_slices():
                    cells[:, patch_rows, :, row, :, vector_channels].neg_()
        # Zero the rows, then the columns, before and after the padded field.
        for dim, padded_size in enumerate(self.padding.padded_shape(self.field_shape), start=1):
            end = self.shape[dim - 1] * stride
            # The minimum is needed because the padded field may be longer than the patches, if the stride does not
            # divide its size.
            first_after = min(before + padded_size, end)
            for start, stop in ((0, before), (first_after, end)):
                for patch_lines, line in self._locate_lines(start, stop):
                    num_patches = patch_lines.stop - patch_lines.start
                    # Dimension `dim` is the patches, dimension `dim + 2` is the lines in a patch.
                    cells.narrow(dim, patch_lines.start, num_patches).select(dim + 2, line).zero_()
        return patches_BHWK

    def _locate_lines(self, start: int, stop: int) -> Iterator[tuple[slice, int]]:
        """Yield pairs that together select the lines of cells from `start` to `stop` - 1. A line is a row or a column.

        A pair (patches, line) selects the line with this index in each patch of the slice `patches`.
        """
        for line in range(self.stride):
            # Line `line` of patch p is row p * stride + line. `-(-a // b)` is a / b, rounded up.
            first_patch = -(-(start - line) // self.stride)
            end_patch = -(-(stop - line) // self.stride)
            if first_patch < end_patch:
                yield slice(first_patch, end_patch), line


def _repeat_gather_index(gather_index: Tensor, num_samples: int, cells_per_sample: int) -> Tensor:
    """Return the gather index for the concatenated cells of a batch, (num_samples, cells of all patches).

    Args:
        gather_index: index into the cells of one sample.
        num_samples: number of samples.
        cells_per_sample: number of cells H * W of a sample.
    """
    samples = torch.arange(num_samples, dtype=gather_index.dtype, device=gather_index.device)
    return gather_index + cells_per_sample * samples[:, None]
