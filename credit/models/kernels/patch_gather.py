"""Gather of the patches of a padded field (space-to-depth), for convolutions with large kernels.

A patch is a square of stride x stride cells. Each cell of each patch is looked up in the field by an index, so the
padded field is never formed.

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
    """Patches of a padded field, with patches of zeros around it for kernels that are centred on a patch.

    Attributes:
        stride: edge of a patch in cells.
        largest_kernel: edge of the largest kernel in cells.
        field_shape: (rows, columns) of the field without padding.
        padding: padding of the field on the sphere.
        has_halo: True if the field already has the cells around it that the largest kernel reads; no zeros are
            added then.
    """

    stride: int
    largest_kernel: int
    field_shape: tuple[int, int]
    padding: SpherePadding
    has_halo: bool = False

    @property
    def output_shape(self) -> tuple[int, int]:
        """Number of rows and columns of patches on which an output of the convolution is centred."""
        height, width = self.padding.padded_shape(self.field_shape)
        num_around = 0
        if self.has_halo:
            num_around = self.largest_kernel // self.stride - 1
        return height // self.stride - num_around, width // self.stride - num_around

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns of all patches, those of zeros around the padded field included."""
        num_around = self.largest_kernel // self.stride - 1
        height, width = self.output_shape
        return height + num_around, width + num_around

    def first_patch(self, kernel: int) -> int:
        """Return the index of the first row (and column) of patches that a kernel with an edge of `kernel` cells reads.

        Smaller kernels than the largest do not read all of the patches of zeros.
        """
        return (self.largest_kernel - kernel) // 2 // self.stride

    def gather_index(self, device: torch.device) -> Tensor:
        """Return the index of the cell of the field (row * W + column) that each cell of the patches is copied from.

        The result is int32, one-dimensional and in the order (row of patches, column of patches, row in the patch,
        column in the patch). Cells outside of the padded field have the index 0, and `unfold` sets them to zero.
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
        # (row of patches, row in the patch, column of patches, column in the patch), then the middle two are swapped.
        return numbers.view(rows // self.stride, self.stride, -1, self.stride).transpose(1, 2).flatten()

    def unfold(self, x_BHWC: Tensor, gather_index: Tensor) -> Tensor:
        """Return the patches (B, *shape, stride^2 * C) of a field.

        The channels of a patch are ordered (row in the patch, column in the patch, C).
        """
        B, H, W, C = x_BHWC.shape
        # Each cell is a row of a table with C columns, from which the index takes copies.
        cells = F.embedding(_index_of_samples(gather_index, B, H * W), x_BHWC.reshape(-1, C))
        return self._zero_outside_and_flip_signs_(cells.view(B, *self.shape, -1), C)

    def fold(self, patches_BHWK: Tensor, gather_index: Tensor, channels: int) -> Tensor:
        """Apply the transpose of `unfold`: return (B, H, W, C), for each cell of the field the sum over its copies.

        Args:
            patches_BHWK: patches; they are overwritten.
            gather_index: result of `gather_index`.
            channels: number of channels C of the field.
        """
        B = len(patches_BHWK)
        H, W = self.field_shape
        # Zeros and signs are a diagonal matrix, which is its own transpose.
        cells = self._zero_outside_and_flip_signs_(patches_BHWK, channels).view(-1, channels)
        index = _index_of_samples(gather_index, B, H * W).flatten()
        # The gradient of an embedding with respect to its table is the sum over the copies. The last two arguments are
        # those of an embedding without padding index and without scaling.
        return torch.ops.aten.embedding_dense_backward(cells, index, B * H * W, -1, False).view(B, H, W, channels)

    @property
    def _cells_before(self) -> int:
        """Number of rows (and columns) of zeros between the edge of the first patch and the padded field."""
        if self.has_halo:
            return 0
        return (self.largest_kernel - self.stride) // 2

    def _zero_outside_and_flip_signs_(self, patches_BHWK: Tensor, channels: int) -> Tensor:
        """Set cells outside of the padded field to zero, and change the sign of vectors beyond a pole, in place.

        The lookup by index can do neither, as it only copies values.
        """
        stride = self.stride
        before = self._cells_before
        # (B, row of patches, column of patches, row in the patch, column in the patch, C)
        cells = patches_BHWK.unflatten(-1, (stride, stride, channels))
        for rows in self.padding.rows_across_pole(self.field_shape[0]):
            for patch_rows, row in self._locate_lines(before + rows.start, before + rows.stop):
                for vector_channels in self.padding.vector_slices():
                    cells[:, patch_rows, :, row, :, vector_channels].neg_()
        # Zero the rows, then the columns, before and after the padded field.
        for dim, padded_size in enumerate(self.padding.padded_shape(self.field_shape), start=1):
            end = self.shape[dim - 1] * stride
            # Cells of the padded field that the stride does not cover lie in no patch, so it may reach beyond the end.
            first_after = min(before + padded_size, end)
            for start, stop in ((0, before), (first_after, end)):
                for patch_lines, line in self._locate_lines(start, stop):
                    num_patches = patch_lines.stop - patch_lines.start
                    # Dimension `dim` counts the patches, dimension `dim + 2` the lines in a patch.
                    cells.narrow(dim, patch_lines.start, num_patches).select(dim + 2, line).zero_()
        return patches_BHWK

    def _locate_lines(self, start: int, stop: int) -> Iterator[tuple[slice, int]]:
        """Yield (slice of patches, row in the patch) pairs that together cover the rows of cells `start` to `stop`.

        The same holds for columns.
        """
        for line in range(self.stride):
            # Line `line` of patch p is row p * stride + line. `-(-a // b)` is a / b, rounded up.
            first_patch = -(-(start - line) // self.stride)
            end_patch = -(-(stop - line) // self.stride)
            if first_patch < end_patch:
                yield slice(first_patch, end_patch), line


def _index_of_samples(gather_index: Tensor, num_samples: int, cells_per_sample: int) -> Tensor:
    """Return the index (num_samples, cells of all patches) into the cells of all samples, one sample after another."""
    samples = torch.arange(num_samples, dtype=gather_index.dtype, device=gather_index.device)
    return gather_index + cells_per_sample * samples[:, None]
