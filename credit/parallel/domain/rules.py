"""Domain-parallel rules, which change the layers of a network so that a rank computes its part of a divided field.

A layer whose results depend on cells of other ranks gets a rule. A rule exchanges cells before the layer and crops the
output of the layer; the computation of the layer itself is unchanged. Layers that compute each cell separately, such as
linear layers and layer norms, need no rule. Attention inside windows that are never cut needs no rule either.

Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from credit.parallel.domain.division import FieldDivision, FieldPart
from credit.parallel.domain.exchange import ZERO, CellExchange, Cells, as_cells


class DomainRule(ABC):
    """Base class of the domain-parallel rules of layers."""

    @abstractmethod
    def install(self, layer: nn.Module, group: dist.ProcessGroup) -> None:
        """Change a layer in place so that it computes this rank's part of a field.

        Args:
            layer: layer of the kind for which the rule is made.
            group: ranks that share the field.
        """


@dataclass(frozen=True)
class Reach:
    """Range of input cells that a layer reads for its output cells; it is the same along rows and columns.

    Attributes:
        before: number of additional input cells that the layer reads before those at the position of its output cells.
        after: number of additional input cells that the layer reads after those at the position of its output cells.
        stride: number of input cells per output cell, for a layer that reduces the resolution.
        factor: number of output cells per input cell, for a layer that increases the resolution.
    """

    before: int = 0
    after: int = 0
    stride: int = 1
    factor: int = 1

    def input_range(self, output: range) -> range:
        """Return the range of input cells that a layer reads for a range of output cells.

        The range may extend beyond the ends of the axis, where a layer reads zeros.

        Args:
            output: non-empty range of output cells.
        """
        start = output.start * self.stride // self.factor - self.before
        # `-(-a // b)` is a / b, rounded up.
        end = -(-output.stop * self.stride // self.factor) + self.after
        return range(start, end)

    def input_part(self, output: FieldPart) -> FieldPart:
        """Return the input rows and columns that a layer reads for a part of its output, see `input_range`."""
        return FieldPart(self.input_range(output.rows), self.input_range(output.columns))

    def first_output(self, inputs: range) -> int:
        """Return the index of the first output cell that a layer without padding computes from an input range."""
        return (inputs.start + self.before) * self.factor // self.stride


@dataclass(frozen=True)
class NeighbourRule(DomainRule):
    """Rule of a layer that reads neighbouring cells, such as a convolution or an up-sampling.

    The input of the layer is (B, C, H, W). The rule switches off the padding of the layer: neighbouring cells are
    received from other ranks, and cells beyond the edge of the field are zeros.

    Attributes:
        source: division of the layer's input.
        target: division of the layer's output.
        reach: range of input cells that the layer reads for its output cells.
        returns_tokens: True if the layer returns (B, H, W, C), False if it returns (B, C, H, W).
    """

    source: FieldDivision
    target: FieldDivision
    reach: Reach
    returns_tokens: bool = False

    def input_shape(self) -> tuple[int, int]:
        """Return (number of rows, number of columns) of the whole input field of the layer."""
        return self.source.shape

    def find_cells(self, part: FieldPart) -> list[Cells]:
        """Return the cells that form a part of the layer's input, as blocks of rows.

        Rows and columns of the cells are indices in the field that `source` divides.

        Args:
            part: rows and columns of the layer's input; all of them are inside the field.
        """
        return [Cells(part.rows, part.columns)]

    def remove_padding(self, layer: nn.Module) -> None:
        """Change the layer in place so that it no longer pads its input.

        Raises:
            TypeError: if the rule does not support the padding of this kind of layer.
        """
        if isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros":
            layer.padding = (0, 0)
        elif self.reach.before or self.reach.after:
            raise TypeError(
                f"NeighbourRule: the rule does not support the padding of {type(layer).__name__}; it supports a Conv2d "
                "that pads with zeros, and layers that read no neighbouring cells; for other layers, write a subclass "
                "with the method remove_padding"
            )

    def convert(self, x_BCHW: Tensor) -> Tensor:
        """Convert the layer's input to the dtype in which the ranks exchange it."""
        return x_BCHW

    def prepare(self, x_BHWC: Tensor, rows: range) -> Tensor:
        """Convert the received cells to the layer's input.

        Args:
            x_BHWC: cells that this rank needs, from the exchange.
            rows: rows of these cells in the layer's input; some rows may be beyond the edges of the field.
        """
        return x_BHWC

    def install(self, layer: nn.Module, group: dist.ProcessGroup) -> None:
        """Register hooks that exchange cells before the layer and crop its output to this rank's part.

        Args:
            layer: layer that reads neighbouring cells; its padding is removed.
            group: ranks that share the field.
        """
        self.remove_padding(layer)
        inputs = [self.reach.input_part(self.target.held(rank)) for rank in range(self.target.num_ranks)]
        exchange = build_exchange(group, self.source, [self.find_cells_and_zeros(part) for part in inputs])
        rank = dist.get_rank(group)
        target = self.target.held(rank)
        first_row = target.rows.start - self.reach.first_output(inputs[rank].rows)
        first_column = target.columns.start - self.reach.first_output(inputs[rank].columns)
        row_dim = 1 if self.returns_tokens else 2
        num_rows, num_columns = target.shape

        def collect(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x_BHWC = exchange(self.convert(args[0]).permute(0, 2, 3, 1))
            x_BHWC = self.prepare(x_BHWC, inputs[rank].rows)
            return (x_BHWC.permute(0, 3, 1, 2), *args[1:])

        def crop(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return output.narrow(row_dim, first_row, num_rows).narrow(row_dim + 1, first_column, num_columns)

        layer.register_forward_pre_hook(collect)
        layer.register_forward_hook(crop)

    def find_cells_and_zeros(self, part: FieldPart) -> list[Cells]:
        """Return the cells of `find_cells`, and `ZERO` for rows and columns beyond the edges of the input field.

        Args:
            part: rows and columns of the layer's input; some of them may be beyond the edges of the field.
        """
        height, width = self.input_shape()
        rows = range(max(part.rows.start, 0), min(part.rows.stop, height))
        columns = range(max(part.columns.start, 0), min(part.columns.stop, width))
        zeros_west = [ZERO] * (columns.start - part.columns.start)
        zeros_east = [ZERO] * (part.columns.stop - columns.stop)
        blocks = []
        for cells in self.find_cells(FieldPart(rows, columns)):
            blocks.append(Cells(cells.rows, [*zeros_west, *cells.columns, *zeros_east]))
        # Rows of zeros are separate blocks.
        zeros_north = Cells([ZERO] * (rows.start - part.rows.start), blocks[0].columns)
        zeros_south = Cells([ZERO] * (part.rows.stop - rows.stop), blocks[0].columns)
        return [zeros_north, *blocks, zeros_south]


@dataclass(frozen=True)
class TokenCountRule(DomainRule):
    """Rule of a linear layer that tensor parallelism may split; the rule sets the number of tokens of each rank.

    Sequence parallelism needs these numbers to gather the tokens of the tensor-parallel ranks.

    Attributes:
        division: division of the layer's tokens, or of its windows, among the ranks.
        tokens_per_window: number of tokens of a window; 1 if `division` divides tokens.
    """

    division: FieldDivision
    tokens_per_window: int = 1

    def install(self, layer: nn.Module, group: dist.ProcessGroup) -> None:
        """Set ``layer.tokens_by_rank`` to the number of tokens of a sample on each rank.

        Args:
            layer: linear layer.
            group: ranks that share the field.
        """
        shapes = [self.division.held(rank).shape for rank in range(self.division.num_ranks)]
        layer.tokens_by_rank = tuple(rows * columns * self.tokens_per_window for rows, columns in shapes)


def build_exchange(group: dist.ProcessGroup, source: FieldDivision, needed: Sequence[Sequence[Cells]]) -> CellExchange:
    """Build the exchange that sends each rank the cells of a divided field that it needs.

    Args:
        group: ranks that share the field.
        source: division of the field.
        needed: for each rank, the blocks of cells that it needs, see `CellExchange`.
    """
    ranks = range(source.num_ranks)
    available = [as_cells(source.owned(rank)) for rank in ranks]
    held = [as_cells(source.held(rank)) for rank in ranks]
    return CellExchange(group, available, held, needed)
