"""Exchange of cells between the ranks of a domain group, from one distribution of a field to a different distribution.

All communication of divided fields uses the same operation: each rank has some rows and columns of a field, and
receives the rows and columns that it needs. The operation exchanges halos, padding across the poles, windows of distant
cells, and the parts of the next stage's division. Only the lists of rows and columns differ.

Shape suffixes: B batch, H and W rows and columns of a rank's cells, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.parallel.domain.division import FieldPart
from credit.parallel.domain.exchange_op import exchange_cells, register_exchange

# Index of a row or column of zeros, such as the zeros that a convolution reads around a field.
ZERO = -1


class Cells(NamedTuple):
    """Cells at all combinations of a list of rows and a list of columns, in row-major order.

    In the cells that a rank needs, a row or column may occur more than once, and the index `ZERO` means a row or column
    of zeros. In the cells that a rank has, each row and column occurs once.

    Attributes:
        rows: row indices in the whole field.
        columns: column indices in the whole field.
    """

    rows: Sequence[int]
    columns: Sequence[int]


def as_cells(part: FieldPart) -> Cells:
    """Convert a part of a field to `Cells`."""
    return Cells(part.rows, part.columns)


# Positions along one dimension of a tensor: a slice if they are consecutive, otherwise an index tensor.
Positions = slice | Tensor


@dataclass(frozen=True)
class _Route:
    """Positions of a block of cells that one rank sends to another rank, in the tensor of one of these two ranks.

    Attributes:
        peer: index in the group of the rank that receives or sends the block.
        rows: positions of the rows in this rank's tensor (its input tensor if it sends, its output tensor if it
            receives).
        columns: positions of the columns in this rank's tensor.
        shape: (number of rows, number of columns) of the block.
    """

    peer: int
    rows: Positions
    columns: Positions
    shape: tuple[int, int]

    def to(self, device: torch.device) -> _Route:
        """Return a copy with the index tensors on `device`."""
        rows, columns = self.rows, self.columns
        if isinstance(rows, Tensor):
            rows = rows.to(device)
        if isinstance(columns, Tensor):
            columns = columns.to(device)
        return _Route(self.peer, rows, columns, self.shape)


class CellExchange:
    """Differentiable exchange that sends each rank of a group the cells that it needs.

    The gradient of a cell is the sum of the gradients of its copies on all ranks.

    Args:
        group: ranks that exchange cells.
        available: for each rank, the cells that it may send; each cell occurs on at most one rank.
        held: for each rank, the cells of its input tensor, a superset of its `available` cells.
        needed: for each rank, the blocks of cells that it needs. The blocks are stacked along the rows of the output
            tensor, so all blocks of a rank have the same number of columns.

    Attributes:
        input_shape: (number of rows, number of columns) of this rank's input tensor.
        output_shape: (number of rows, number of columns) of this rank's output tensor.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        available: Sequence[Cells],
        held: Sequence[Cells],
        needed: Sequence[Sequence[Cells]],
    ) -> None:
        self.group = group
        rank = dist.get_rank(group)
        num_ranks = dist.get_world_size(group)
        self.input_shape = (len(held[rank].rows), len(held[rank].columns))
        self.output_shape = (sum(len(block.rows) for block in needed[rank]), len(needed[rank][0].columns))
        # Local copies of this rank, as pairs of routes: positions of the cells in the input, and in the output.
        self._copies: list[tuple[_Route, _Route]] = []
        self._sends: list[_Route] = []
        self._receives: list[_Route] = []
        # True if any rank sends to another rank. All ranks have the same value, because the exchange is collective.
        self._communicates = False
        for source in range(num_ranks):
            for destination in range(num_ranks):
                pairs = _find_routes(source, destination, available[source], held[source], needed[destination])
                if source != destination and pairs:
                    self._communicates = True
                for send, receive in pairs:
                    if source == destination == rank:
                        self._copies.append((send, receive))
                    elif source == rank:
                        self._sends.append(send)
                    elif destination == rank:
                        self._receives.append(receive)
        # Positions of the rows and columns of zeros in this rank's output tensor.
        rows = [row for block in needed[rank] for row in block.rows]
        self._zero_rows = _find_zeros(rows)
        self._zero_columns = _find_zeros(needed[rank][0].columns)
        self._num_ranks = num_ranks
        self._device = torch.device("cpu")
        self._exchange_id = register_exchange(self)
        self._is_identity = not self._communicates and self._copies_everything()

    def __call__(self, x_BHWC: Tensor) -> Tensor:
        """Collective: exchange cells, and return the cells (B, rows, columns, C) that this rank needs.

        Args:
            x_BHWC: input tensor with this rank's `held` cells.
        """
        if self._is_identity:
            return x_BHWC
        if torch.compiler.is_compiling():
            return exchange_cells(x_BHWC, self._exchange_id)
        # Outside of compiled graphs, an autograd function needs less host time than a custom operator.
        return _ExchangeCells.apply(x_BHWC, self)

    def exchange_fields(self, x_BCHW: Tensor) -> Tensor:
        """Collective: exchange cells of fields (B, C, H, W), and return the needed cells (B, C, rows, columns)."""
        return self(x_BCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def move(self, x_BHWC: Tensor) -> Tensor:
        """Collective: exchange cells without a gradient, and return the needed cells (B, rows, columns, C)."""
        batch, channels = x_BHWC.shape[0], x_BHWC.shape[3]
        self._move_routes(x_BHWC.device)
        # One copy to a contiguous layout is faster than many small copies from a different layout.
        x_BHWC = x_BHWC.contiguous()
        y_BHWC = x_BHWC.new_empty(batch, *self.output_shape, channels)
        for dim, positions in ((1, self._zero_rows), (2, self._zero_columns)):
            if len(positions):
                y_BHWC.index_fill_(dim, positions, 0)
        for source, destination in self._copies:
            _write_block(y_BHWC, destination, _read_block(x_BHWC, source))
        if self._communicates:
            for route, block in self._exchange_blocks(x_BHWC, self._sends, self._receives):
                _write_block(y_BHWC, route, block)
        return y_BHWC

    def move_gradient(self, gradient_BHWC: Tensor) -> Tensor:
        """Collective: return the gradient of the held cells (B, H, W, C), given the gradient of the needed cells."""
        batch, channels = gradient_BHWC.shape[0], gradient_BHWC.shape[3]
        self._move_routes(gradient_BHWC.device)
        gradient_BHWC = gradient_BHWC.contiguous()
        result_BHWC = gradient_BHWC.new_zeros(batch, *self.input_shape, channels)
        for source, destination in self._copies:
            _add_block(result_BHWC, source, _read_block(gradient_BHWC, destination))
        if self._communicates:
            for route, block in self._exchange_blocks(gradient_BHWC, self._receives, self._sends):
                _add_block(result_BHWC, route, block)
        return result_BHWC

    def _exchange_blocks(
        self, x_BHWC: Tensor, sends: list[_Route], receives: list[_Route]
    ) -> list[tuple[_Route, Tensor]]:
        """Collective: exchange blocks with other ranks; return (route, received block) for each route in `receives`.

        Args:
            x_BHWC: tensor from which the blocks are read.
            sends: routes of the blocks that this rank sends.
            receives: routes of the blocks that this rank receives, each (B, rows, columns, C).
        """
        batch, channels = x_BHWC.shape[0], x_BHWC.shape[3]
        blocks = [_read_block(x_BHWC, route).flatten() for route in sends]
        send_buffer = torch.cat(blocks) if blocks else x_BHWC.new_empty(0)
        receive_sizes = [batch * route.shape[0] * route.shape[1] * channels for route in receives]
        receive_buffer = x_BHWC.new_empty(sum(receive_sizes))
        dist.all_to_all_single(
            receive_buffer,
            send_buffer,
            output_split_sizes=self._count_by_peer(receives, batch * channels),
            input_split_sizes=self._count_by_peer(sends, batch * channels),
            group=self.group,
        )
        received = receive_buffer.split(receive_sizes)
        return [
            (route, block.view(batch, *route.shape, channels)) for route, block in zip(receives, received, strict=True)
        ]

    def _count_by_peer(self, routes: list[_Route], values_per_cell: int) -> list[int]:
        """Return, for each rank, the number of values that `routes` send to it or receive from it."""
        counts = [0] * self._num_ranks
        for route in routes:
            counts[route.peer] += route.shape[0] * route.shape[1] * values_per_cell
        return counts

    def _move_routes(self, device: torch.device) -> None:
        """Move the index tensors of all routes to a device, unless they are already there."""
        if device == self._device:
            return
        self._copies = [(source.to(device), destination.to(device)) for source, destination in self._copies]
        self._sends = [route.to(device) for route in self._sends]
        self._receives = [route.to(device) for route in self._receives]
        self._zero_rows = self._zero_rows.to(device)
        self._zero_columns = self._zero_columns.to(device)
        self._device = device

    def _copies_everything(self) -> bool:
        """Return True if this rank needs exactly the cells that it holds, in the same order."""
        if self.input_shape != self.output_shape or len(self._copies) != 1:
            return False
        all_cells = (slice(0, self.input_shape[0]), slice(0, self.input_shape[1]))
        return all((route.rows, route.columns) == all_cells for route in self._copies[0])


class _ExchangeCells(torch.autograd.Function):
    """Autograd function of `CellExchange`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BHWC: Tensor, exchange: CellExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.move(x_BHWC)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient_BHWC: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.move_gradient(gradient_BHWC), None


def _find_routes(
    source: int, destination: int, available: Cells, held: Cells, needed: Sequence[Cells]
) -> list[tuple[_Route, _Route]]:
    """Return (route of the sender, route of the receiver) for each block that one rank sends to another rank.

    Args:
        source: rank that sends.
        destination: rank that receives.
        available: cells that the sender may send.
        held: cells of the sender's input tensor.
        needed: blocks of cells that are stacked along the rows of the receiver's output tensor.
    """
    pairs = []
    first_row = 0
    for block in needed:
        sent_rows, received_rows = _match_indices(available.rows, held.rows, block.rows)
        sent_columns, received_columns = _match_indices(available.columns, held.columns, block.columns)
        if len(sent_rows) and len(sent_columns):
            shape = (len(sent_rows), len(sent_columns))
            send = _Route(destination, _as_positions(sent_rows), _as_positions(sent_columns), shape)
            placed_rows = _as_positions(received_rows + first_row)
            receive = _Route(source, placed_rows, _as_positions(received_columns), shape)
            pairs.append((send, receive))
        first_row += len(block.rows)
    return pairs


def _match_indices(
    available: Sequence[int], held: Sequence[int], needed: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Find the indices in both `available` and `needed`; return their positions in `held` and in `needed`.

    An index is the number of a row or column in the whole field.
    """
    held_array = np.asarray(held, dtype=np.int64)
    needed_array = np.asarray(needed, dtype=np.int64)
    size = 1 + max(held_array.max(initial=-1), needed_array.max(initial=-1))
    # index in the whole field -> position in `held`; -1 if the index is not available
    positions = np.full(size, -1, dtype=np.int64)
    positions[held_array] = np.arange(len(held_array))
    is_available = np.zeros(size, dtype=bool)
    is_available[np.asarray(available, dtype=np.int64)] = True
    positions[~is_available] = -1
    held_positions = positions[needed_array]
    is_sent = (held_positions >= 0) & (needed_array != ZERO)
    return held_positions[is_sent], np.flatnonzero(is_sent)


def _find_zeros(indices: Sequence[int]) -> Tensor:
    """Return the positions of `ZERO` in a list of rows or columns."""
    return torch.from_numpy(np.flatnonzero(np.asarray(indices) == ZERO))


def _as_positions(indices: np.ndarray) -> Positions:
    """Convert ascending consecutive indices to a slice, and other indices to an index tensor."""
    if np.all(np.diff(indices) == 1):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return torch.from_numpy(indices)


def _read_block(x_BHWC: Tensor, route: _Route) -> Tensor:
    """Return the cells (B, rows, columns, C) at the positions of a route."""
    return _select(_select(x_BHWC, 1, route.rows), 2, route.columns)


def _select(x: Tensor, dim: int, positions: Positions) -> Tensor:
    """Select positions along a dimension; the result is a view for a slice, otherwise a copy."""
    if isinstance(positions, slice):
        return x.narrow(dim, positions.start, positions.stop - positions.start)
    return x.index_select(dim, positions)


def _write_block(y_BHWC: Tensor, route: _Route, block_BHWC: Tensor) -> None:
    """Write a block to the positions of a route in `y_BHWC`, in place."""
    rows, columns = route.rows, route.columns
    if isinstance(rows, Tensor) and isinstance(columns, Tensor):
        # Two one-dimensional index tensors would select pairs. With a second dimension, they select all combinations.
        rows = rows[:, None]
    y_BHWC[:, rows, columns] = block_BHWC


def _add_block(y_BHWC: Tensor, route: _Route, block_BHWC: Tensor) -> None:
    """Add a block to the positions of a route in `y_BHWC`, in place; a row or column may occur several times."""
    columns = route.columns
    if isinstance(columns, Tensor):
        # Add along the columns first, into a tensor with the rows of the block and all columns of the target.
        batch, _, width, channels = y_BHWC.shape
        spread_BHWC = y_BHWC.new_zeros(batch, route.shape[0], width, channels)
        block_BHWC = spread_BHWC.index_add_(2, columns, block_BHWC)
        columns = slice(None)
    target_BHWC = y_BHWC[:, :, columns]
    if isinstance(route.rows, Tensor):
        target_BHWC.index_add_(1, route.rows, block_BHWC)
    else:
        target_BHWC[:, route.rows] += block_BHWC
