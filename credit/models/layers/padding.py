"""Padding of a global field across the poles and around the globe.

Rows are ordered from north to south, so pads are `(north, south)` rows and `(west, east)` columns. If your rows are
ordered from south to north, swap the two pads of the rows.

Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credit.models.kernels.dispatch import SPHERE_PADDING, uses_kernel
from credit.models.kernels.sphere_padding import pad_sphere


@dataclass(frozen=True)
class SpherePadding:
    """Padding on the sphere for (B, C, ..., H, W) fields.

    Mode `earth` continues a meridian beyond the pole at the opposite longitude. Beyond the pole, the eastward and
    northward components of a vector have the opposite direction, so channels with these components change sign there.

    Attributes:
        mode: `earth` continues rows across the poles, which needs an even number of columns; `mirror` reflects rows at
            the first and last row, at the same longitude.
        lat: number of rows added in the north and in the south.
        lon: number of columns added in the west and in the east; they continue the field periodically.
        skip: number of rows at each pole that `earth` does not copy beyond the pole: 1 if the grid has a row at the
            pole itself, otherwise 0; a pair (north, south) if the two poles differ. `mirror` never copies the outermost
            row.
        vector_channels: indices of the channels whose sign `earth` changes beyond a pole.
    """

    mode: str = "earth"
    lat: tuple[int, int] = (0, 0)
    lon: tuple[int, int] = (0, 0)
    skip: int | tuple[int, int] = 0
    vector_channels: tuple[int, ...] = ()

    @property
    def skips(self) -> tuple[int, int]:
        """Number of rows at the (north, south) pole that `earth` does not copy beyond the pole."""
        if isinstance(self.skip, int):
            return self.skip, self.skip
        return self.skip

    def padded_shape(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the number of rows and columns of the padded field; `grid` is the shape of the unpadded field."""
        height, width = grid
        return height + sum(self.lat), width + sum(self.lon)

    def pad(self, x: Tensor) -> Tensor:
        """Return the padded field (B, C, ..., H + sum(lat), W + sum(lon))."""
        if self.mode == "earth" and (any(self.lat) or any(self.lon)) and uses_kernel(SPHERE_PADDING, x):
            return pad_sphere(x, self)
        return self.pad_plain(x)

    def pad_plain(self, x: Tensor) -> Tensor:
        """Plain formulation of `pad`, with the operators of torch."""
        if not any(self.lat):
            return self._pad_lon(x)
        # `earth` pads rows first, because it rolls the columns of the unpadded field to get the opposite meridian.
        if self.mode == "earth":
            return self._pad_lon(self._pad_lat_earth(x))
        return self._pad_lat_mirror(self._pad_lon(x))

    def crop(self, x: Tensor) -> Tensor:
        """Return the field without the padding, as a view; the inverse of `pad`."""
        north, south = self.lat
        west, east = self.lon
        return x[..., north : x.shape[-2] - south, west : x.shape[-1] - east]

    def find_rows_beyond_pole(self, height: int) -> tuple[range, ...]:
        """Return the ranges of rows of the padded field beyond the poles, in which vector channels change sign.

        The result is empty if the padding has no vector channels.

        Args:
            height: number of rows of the field before padding.
        """
        if not self.vector_channels:
            return ()
        north, south = self.lat
        return range(north), range(north + height, north + height + south)

    def find_cells(
        self, rows: range, columns: range, grid: tuple[int, int]
    ) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Return the cells of the field from which a rectangle of the padded field is copied.

        Args:
            rows: row indices of the rectangle in the padded field.
            columns: column indices of the rectangle in the padded field.
            grid: number of rows and columns of the field without padding.

        Returns:
            Up to three blocks of rows, from north to south: beyond the north pole, on the field, beyond the south pole.
            Each block is a pair: the row indices and the column indices, in the field, of the cells of the block.
        """
        height, width = grid
        north, west = self.lat[0], self.lon[0]
        columns_here = [(column - west) % width for column in columns]
        columns_beyond_pole = columns_here
        if self.mode == "earth":
            columns_beyond_pole = [(column - west - width // 2) % width for column in columns]
        # Row 0 of the field is row `north` of the padded field. Beyond a pole, the rows are in reverse order.
        skip_north, skip_south = self.skips
        rows_north = [skip_north + north - 1 - row for row in rows if row < north]
        rows_here = [row - north for row in rows if north <= row < north + height]
        rows_south = [2 * height + north - 1 - skip_south - row for row in rows if row >= north + height]
        blocks = (
            (rows_north, columns_beyond_pole),
            (rows_here, columns_here),
            (rows_south, columns_beyond_pole),
        )
        return [block for block in blocks if block[0]]

    def find_vector_slices(self) -> list[slice]:
        """Return `vector_channels` as a list of slices, because slices need no index tensor on the device."""
        slices: list[slice] = []
        for channel in sorted(set(self.vector_channels)):
            # Neighbouring channels share a slice.
            if slices and slices[-1].stop == channel:
                slices[-1] = slice(slices[-1].start, channel + 1)
            else:
                slices.append(slice(channel, channel + 1))
        return slices

    def _pad_lon(self, x: Tensor) -> Tensor:
        """Return the field with periodic columns added in the west and in the east."""
        west, east = self.lon
        if not (west or east):
            return x
        return torch.cat((x[..., x.shape[-1] - west :], x, x[..., :east]), dim=-1)

    def _pad_lat_earth(self, x: Tensor) -> Tensor:
        """Return the field with rows added beyond the poles; each meridian continues at the opposite longitude."""
        height = x.shape[-2]
        north, south = self.lat
        skip_north, skip_south = self.skips
        beyond_north = self._cross_pole(x[..., skip_north : skip_north + north, :])
        beyond_south = self._cross_pole(x[..., height - skip_south - south : height - skip_south, :])
        return torch.cat((beyond_north, x, beyond_south), dim=-2)

    def _cross_pole(self, rows: Tensor) -> Tensor:
        """Return the rows beyond a pole, computed from the rows next to the pole; both are (B, C, ..., rows, W).

        The result has the rows in reverse order, shifted by half the columns. Vector channels change sign.
        """
        beyond_pole = rows.flip(-2).roll(rows.shape[-1] // 2, -1)
        for channels in self.find_vector_slices():
            # `roll` returned a new tensor, so the field itself does not change.
            beyond_pole[:, channels].neg_()
        return beyond_pole

    def _pad_lat_mirror(self, x: Tensor) -> Tensor:
        """Return the field with rows reflected at the first and last row; these two rows are not repeated."""
        height = x.shape[-2]
        north, south = self.lat
        beyond_north = x[..., 1 : 1 + north, :].flip(-2)
        beyond_south = x[..., height - 1 - south : height - 1, :].flip(-2)
        return torch.cat((beyond_north, x, beyond_south), dim=-2)


NO_PADDING = SpherePadding("mirror")


def compute_stage_sizes(padded: int, strides: Sequence[int]) -> list[int]:
    """Return the number of rows (or columns) of each stage of a hierarchical encoder.

    Args:
        padded: number of rows (or columns) of the padded field.
        strides: stride of the embedding of each stage. Sizes are rounded down, because an embedding drops the last
            cells of an axis if they do not fill a token.
    """
    return [padded // math.prod(strides[: i + 1]) for i in range(len(strides))]


def window_multiple(strides: Sequence[int], windows: Sequence[Sequence[int]]) -> int:
    """Return the smallest m such that the windows of all stages fit a padded size that is a multiple of m.

    Args:
        strides: stride of the embedding of each stage.
        windows: edges of the windows of each stage, in cells of the stage; each must divide the size of the stage.
    """
    multiples = []
    for i, stage_windows in enumerate(windows):
        # Number of rows of the padded field per row of the stage.
        cells_per_token = math.prod(strides[: i + 1])
        multiples.append(cells_per_token * math.lcm(*stage_windows))
    return math.lcm(*multiples)


def auto_padding(size: int, multiple: int, strides: Sequence[int]) -> tuple[int, int]:
    """Return the smallest pads (first side, second side) that make the padded size a multiple of `multiple`.

    Each side gets at least half a cell of the coarsest stage, so that the field does not reach the edge of the
    padded field. The published 6 h model and the 1 degree starter config have the padding of this rule.

    Args:
        size: number of rows (or columns) of the field.
        multiple: result of `window_multiple`.
        strides: stride of the embedding of each stage.

    Returns:
        Numbers of rows (or columns) to add on the first side (north or west) and on the second side (south or east).
        If the total is odd, the second side gets one row (or column) more.
    """
    min_pad = math.prod(strides) // 2
    total = math.ceil((size + 2 * min_pad) / multiple) * multiple - size
    return total // 2, total - total // 2
