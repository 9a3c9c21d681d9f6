"""Domain-parallelism rules of the layers in this package. A rule lets each rank compute its part of a layer's output.

`credit.parallel.domain.rules` describes the protocol of rules. Shape suffixes: B batch, C channels, H and W rows and
columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from credit.models.kernels.autocast import autocast_dtype
from credit.models.kernels.merged_head import HALO
from credit.models.layers.cross_scale_embedding import CrossScaleEmbedding
from credit.models.layers.norm import Conditions, GroupNorm
from credit.models.layers.padding import NO_PADDING, SpherePadding
from credit.models.layers.resize import AxisInterpolation, BilinearResize, find_interpolation
from credit.models.layers.seeded_dropout import CellNumbering, SeededDropout
from credit.models.layers.sphere_conv import SphereConv2d
from credit.models.layers.window_attention import WindowAttention
from credit.parallel.domain.division import AxisDivision, FieldDivision, FieldPart, divide_axis
from credit.parallel.domain.exchange import CellExchange, Cells, as_cells
from credit.parallel.domain.group_norm import CellCounts
from credit.parallel.domain.rules import DomainRule, NeighbourRule, Reach, build_exchange


@dataclass(frozen=True)
class PaddedFieldRule(NeighbourRule):
    """Base class of the rules of layers that pad their input across the poles and around the globe.

    The indices of rows and columns that the layer reads are indices in the padded field.

    Attributes:
        padding: padding of the field; `NO_PADDING` for a layer that reads zeros beyond the edge of the field.
    """

    padding: SpherePadding = NO_PADDING

    def input_shape(self) -> tuple[int, int]:
        """Return the number of rows and columns of the padded field."""
        return self.padding.padded_shape(self.source.shape)

    def find_cells(self, part: FieldPart) -> list[Cells]:
        """Return the cells of the field from which a part of the padded field is copied, as a list of blocks of rows.

        Args:
            part: rows and columns of the padded field.
        """
        blocks = self.padding.find_cells(part.rows, part.columns, self.source.shape)
        return [Cells(rows, columns) for rows, columns in blocks]

    def convert(self, x_BCHW: Tensor) -> Tensor:
        """Cast the field to the dtype in which the layer computes, so that fewer bytes are exchanged under autocast."""
        return x_BCHW.to(autocast_dtype(x_BCHW) or x_BCHW.dtype)

    def prepare(self, x_BHWC: Tensor, rows: range) -> Tensor:
        """Change the sign of vector channels beyond the poles in place, and return the field.

        Args:
            x_BHWC: collected part of the padded field.
            rows: rows of the padded field in this part.
        """
        for beyond_pole in self.padding.find_rows_beyond_pole(self.source.shape[0]):
            start = max(beyond_pole.start, rows.start)
            end = min(beyond_pole.stop, rows.stop)
            if start < end:
                rows_beyond_pole = x_BHWC[:, start - rows.start : end - rows.start]
                for channels in self.padding.find_vector_slices():
                    # The collected cells are copies, so the field itself does not change.
                    rows_beyond_pole[..., channels].neg_()
        return x_BHWC


@dataclass(frozen=True)
class CrossScaleEmbeddingRule(PaddedFieldRule):
    """Rule of a `CrossScaleEmbedding`. Only the first embedding of a network has padding.

    Attributes:
        returns_tokens: True, because the output of the layer is tokens (B, H, W, C), see `NeighbourRule`.
    """

    returns_tokens: bool = True

    def remove_padding(self, layer: CrossScaleEmbedding) -> None:
        """Switch off the padding of the layer, because its input already contains the halo."""
        layer.padding = NO_PADDING
        layer.input_has_halo = True


@dataclass(frozen=True)
class SphereConvRule(PaddedFieldRule):
    """Rule of a `SphereConv2d`; `build` computes the cells that the convolution reads."""

    @classmethod
    def build(cls, layer: SphereConv2d, source: FieldDivision, target: FieldDivision) -> SphereConvRule:
        """Return the rule of a convolution.

        Args:
            layer: the convolution.
            source: division of the input of the convolution.
            target: division of the output of the convolution.
        """
        # The first padded cell that output cell i reads is i * stride.
        stride = layer.stride[0]
        reach = Reach(after=layer.kernel_size[0] - stride, stride=stride)
        return cls(source, target, reach, padding=layer.sphere_padding)

    def remove_padding(self, layer: SphereConv2d) -> None:
        """Switch off the padding of the layer, because its input already contains the cells around the field."""
        layer.sphere_padding = NO_PADDING


@dataclass(frozen=True)
class UpSamplingHeadRule(DomainRule):
    """Rule of the head of a decoder, which doubles the resolution and crops the padding.

    Attributes:
        source: division of the input of the head.
        target: division of the grid without padding.
        padding: padding of the grid.
        halo: number of input cells that the head reads on each side of the input cell that contains an output cell.
    """

    source: FieldDivision
    target: FieldDivision
    padding: SpherePadding
    halo: int = HALO

    def install(self, layer: nn.Module, group: dist.ProcessGroup) -> None:
        """Exchange cells before the head, and pass the margins of this rank to the head.

        Args:
            layer: the head; the arguments of its forward are the field and the margins.
            group: the ranks that share the field.
        """
        reach = Reach(self.halo, self.halo, factor=2)
        rank = dist.get_rank(group)
        outputs = [self._find_output(other) for other in range(self.target.num_ranks)]
        inputs = [self._clip_to_input(reach.input_part(output)) for output in outputs]
        exchange = build_exchange(group, self.source, [[as_cells(part)] for part in inputs])
        margins = (
            _find_margins(outputs[rank].rows, inputs[rank].rows),
            _find_margins(outputs[rank].columns, inputs[rank].columns),
        )

        def collect(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict]:
            return (exchange.exchange_fields(args[0]), margins), {}

        layer.register_forward_pre_hook(collect, with_kwargs=True)

    def _clip_to_input(self, part: FieldPart) -> FieldPart:
        """Return `part` clipped to the rows and columns of the input; the head pads with zeros beyond them."""
        height, width = self.source.shape
        rows = range(max(part.rows.start, 0), min(part.rows.stop, height))
        return FieldPart(rows, range(max(part.columns.start, 0), min(part.columns.stop, width)))

    def _find_output(self, rank: int) -> FieldPart:
        """Return the part of the grid on a rank, as rows and columns of the padded output of the head."""
        part = self.target.held(rank)
        north, west = self.padding.lat[0], self.padding.lon[0]
        rows = range(part.rows.start + north, part.rows.stop + north)
        return FieldPart(rows, range(part.columns.start + west, part.columns.stop + west))


def _find_margins(outputs: range, inputs: range) -> tuple[int, int]:
    """Return the number of unneeded output cells (before, after) `outputs` that a head computes from `inputs`."""
    return outputs.start - 2 * inputs.start, 2 * inputs.stop - outputs.stop


@dataclass(frozen=True)
class LongAttentionRule(DomainRule):
    """Rule of long attention. The cells of a window are H / window rows and W / window columns apart.

    The ranks exchange tokens so that each rank has complete windows. After the layer, they send the results back.

    Attributes:
        division: division of the tokens.
        window: edge of a window in cells.
    """

    division: FieldDivision
    window: int

    def install(self, layer: WindowAttention, group: dist.ProcessGroup) -> None:
        """Exchange tokens and per-cell conditions before the layer, and tokens after it.

        Args:
            layer: the attention layer.
            group: the ranks that share the field.
        """
        if self.window == 1:
            # Each window is a single cell, so each rank already has complete windows.
            return
        row_windows = self._divide_windows(self.division.rows)
        column_windows = self._divide_windows(self.division.columns)
        windows = FieldDivision(row_windows, column_windows)
        computed = []
        owned = []
        for rank in range(windows.num_ranks):
            computed.append(self._find_tokens(windows.held(rank)))
            owned.append(self._find_tokens(windows.owned(rank)))
        to_windows = build_exchange(group, self.division, [[cells] for cells in computed])
        tokens = [[as_cells(self.division.held(rank))] for rank in range(self.division.num_ranks)]
        to_tokens = CellExchange(group, owned, computed, tokens)

        def collect(layer: nn.Module, args: tuple[Tensor, Conditions]) -> tuple[Tensor, Conditions]:
            x_BHWC, conditions = args
            if conditions.cells_BHWK is not None:
                conditions = conditions._replace(cells_BHWK=to_windows(conditions.cells_BHWK))
            return to_windows(x_BHWC), conditions

        def return_results(layer: nn.Module, args: tuple[Any, ...], y_BHWC: Tensor) -> Tensor:
            return to_tokens(y_BHWC)

        layer.register_forward_pre_hook(collect)
        layer.register_forward_hook(return_results)

    def _divide_windows(self, axis: AxisDivision) -> AxisDivision:
        """Return the division of the n windows along an axis; window k consists of the cells k, k + n, k + 2n, ..."""
        return divide_axis(axis.size // self.window, len(axis.owned))

    def _find_tokens(self, windows: FieldPart) -> Cells:
        """Return the tokens of a rectangle of windows, in the order in which the layer expects them."""
        return Cells(
            self._list_window_cells(windows.rows, self.division.rows.size),
            self._list_window_cells(windows.columns, self.division.columns.size),
        )

    def _list_window_cells(self, windows: range, size: int) -> list[int]:
        """Return the cells of a range of windows along an axis of `size` cells."""
        num_windows = size // self.window
        cells: list[int] = []
        # The tokens of the layer are ordered (position in the window, window).
        for position in range(self.window):
            cells += [position * num_windows + window for window in windows]
        return cells


@dataclass(frozen=True)
class GroupNormRule(DomainRule):
    """Rule of a group norm: the ranks compute mean and variance over the complete field.

    Attributes:
        division: division of the field.
    """

    division: FieldDivision

    def install(self, layer: GroupNorm, group: dist.ProcessGroup) -> None:
        """Set the ranks and the number of cells of each rank in the norm, so that the norm sums over the ranks.

        Args:
            layer: the group norm.
            group: the ranks that share the field.
        """
        counts = [math.prod(self.division.owned(rank).shape) for rank in range(self.division.num_ranks)]
        layer.cell_counts = CellCounts(group, tuple(counts), dist.get_rank(group))


@dataclass(frozen=True)
class SeededDropoutRule(DomainRule):
    """Rule of seeded dropout: masks depend on the number of a cell (or window) in the complete field.

    Attributes:
        division: division of the cells or windows.
    """

    division: FieldDivision

    def install(self, layer: SeededDropout, group: dist.ProcessGroup) -> None:
        """Tell the layer which cells (or windows) each rank has, as indices in the complete field.

        Args:
            layer: the dropout layer.
            group: the ranks that share the field.
        """
        rank = dist.get_rank(group)
        parts = [self.division.held(other) for other in range(self.division.num_ranks)]
        layer.numberings = tuple(CellNumbering(part.rows, part.columns, self.division.shape[1]) for part in parts)
        layer.field_ranks = range(rank, rank + 1)


@dataclass(frozen=True)
class BilinearResizeRule(DomainRule):
    """Rule of the interpolation of a field to a different number of rows and columns.

    Attributes:
        source: division of the field.
        target: division of the result.
    """

    source: FieldDivision
    target: FieldDivision

    def install(self, layer: BilinearResize, group: dist.ProcessGroup) -> None:
        """Replace `forward` with an interpolation that computes the part of the result on this rank.

        Args:
            layer: the interpolation.
            group: the ranks that share the field.
        """
        interpolations = [self._find_interpolations(rank) for rank in range(self.target.num_ranks)]
        exchange = build_exchange(
            group, self.source, [[Cells(rows.input_range(), columns.input_range())] for rows, columns in interpolations]
        )
        rows, columns = interpolations[dist.get_rank(group)]

        def interpolate(x_BCHW: Tensor) -> Tensor:
            x_BCHW = exchange.exchange_fields(x_BCHW)
            x_BCHW = rows.apply(x_BCHW, 2, rows.input_range().start)
            return columns.apply(x_BCHW, 3, columns.input_range().start)

        layer.forward = interpolate

    def _find_interpolations(self, rank: int) -> tuple[AxisInterpolation, AxisInterpolation]:
        """Return the interpolation along rows and the interpolation along columns for the part of a rank."""
        part = self.target.held(rank)
        rows = find_interpolation(part.rows, self.source.shape[0], self.target.shape[0])
        return rows, find_interpolation(part.columns, self.source.shape[1], self.target.shape[1])
