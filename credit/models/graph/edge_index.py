"""Operations that gather rows along edges and sum rows over edges.

The backward pass of a gather is a sum, and the backward pass of a sum is a gather. Both operations are deterministic on
every device, because the embedding bag of torch adds the rows of each sum in the order of an index. The scatter
operators of torch add in an order that varies from run to run on a GPU.

Shape suffixes: B batch, E edges, S senders, R receivers, L gathered rows, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class RowSelection(NamedTuple):
    """Index of the rows to gather from a tensor, and the inverse index: the positions of each row in the result.

    The inverse index has compressed sparse row form (CSR). For example, the index [2, 0, 2] into 3 rows has the
    positions [1, 0, 2] and the offsets [0, 1, 1]. Row 0 has position 1, row 1 has no position, and row 2 has the
    positions 0 and 2.

    Attributes:
        index: (L,) number of the row to gather at each position.
        positions: (L,) positions in `index`, grouped by row; shorter if some positions are unused.
        offsets: (number of rows,) index into `positions` at which the group of each row begins.
    """

    index: Tensor
    positions: Tensor
    offsets: Tensor

    @classmethod
    def build(cls, index: np.ndarray, num_rows: int, is_used: np.ndarray | None = None) -> RowSelection:
        """Return a selection on the CPU.

        Args:
            index: (L,) numbers of the rows to gather.
            num_rows: number of rows of the tensor.
            is_used: (L,) False at filler positions, which pad a table to a fixed size; their gradient is ignored. None
                if all positions are used.
        """
        positions = np.argsort(index, kind="stable")
        if is_used is not None:
            positions = positions[is_used[positions]]
        counts = np.bincount(index[positions], minlength=num_rows)
        offsets = np.cumsum(counts) - counts
        return cls(*(torch.from_numpy(array.astype(np.int64)) for array in (index, positions, offsets)))

    def repeat(self, batch: int) -> RowSelection:
        """Return the selection for `batch` concatenated tensors; it gathers the same rows from each of the tensors."""
        if batch == 1:
            return self
        return RowSelection(
            repeat_index(self.index, batch, len(self.offsets)),
            repeat_index(self.positions, batch, len(self.index)),
            repeat_index(self.offsets, batch, len(self.positions)),
        )

    def gather(self, x_BNC: Tensor) -> Tensor:
        """Return the selected rows (B, L, C) of a batch of tensors.

        The selection must come from ``repeat(B)``.
        """
        rows = _Gather.apply(x_BNC.flatten(0, 1), *self)
        return rows.view(x_BNC.shape[0], -1, x_BNC.shape[-1])

    def sum_by_row(self, x_BLC: Tensor) -> Tensor:
        """Add the values at all positions that select the same row, and return the sum of each row, (B, N rows, C).

        This is the adjoint of `gather`. The selection must come from ``repeat(B)``.
        """
        sums = _SumByRow.apply(x_BLC.flatten(0, 1), *self)
        return sums.view(x_BLC.shape[0], -1, x_BLC.shape[-1])


class EdgeIndex(NamedTuple):
    """Directed edges, sorted by receiver and then by sender.

    Attributes:
        senders: selection of the sender of each edge.
        receivers: selection of the receiver of each edge.
    """

    senders: RowSelection
    receivers: RowSelection

    @classmethod
    def build(cls, edges_E2: np.ndarray, num_senders: int, num_receivers: int) -> EdgeIndex:
        """Return the index of sorted edges, on the CPU.

        Args:
            edges_E2: edges as (sender, receiver), sorted by `sort_edges`.
            num_senders: number of nodes that may send.
            num_receivers: number of nodes that may receive.
        """
        senders, receivers = edges_E2.T
        return cls(RowSelection.build(senders, num_senders), RowSelection.build(receivers, num_receivers))

    def repeat(self, batch: int) -> EdgeIndex:
        """Return the index of the edges of `batch` graphs, one graph after the other."""
        return EdgeIndex(self.senders.repeat(batch), self.receivers.repeat(batch))


def sort_edges(edges_E2: np.ndarray) -> np.ndarray:
    """Return edges (E, 2) as (sender, receiver), sorted by receiver and then by sender.

    With sorted edges, the rounding of sums does not depend on the order of `edges_E2`.
    """
    return edges_E2[np.lexsort((edges_E2[:, 0], edges_E2[:, 1]))]


def repeat_index(index: Tensor, batch: int, num_rows: int) -> Tensor:
    """Return an index (batch * L,) that selects the same rows from each of `batch` concatenated tensors.

    Args:
        index: (L,) index into the rows of one tensor.
        batch: number of tensors.
        num_rows: number of rows of each tensor.
    """
    offsets = torch.arange(batch, device=index.device) * num_rows
    return (offsets[:, None] + index).flatten()


def _sum_rows(x_LC: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each group of rows, (number of groups, C); 0 for an empty group.

    Args:
        x_LC: rows.
        positions: numbers of the rows in each group, one group after the other.
        offsets: index into `positions` at which each group begins.
    """
    # Autograd does not record this operator. The arguments False, 0, False select unscaled gradients, sums and dense
    # gradients.
    return torch.ops.aten._embedding_bag_forward_only(x_LC, positions, offsets, False, 0, False)[0]


class _Gather(torch.autograd.Function):
    """Autograd function of `RowSelection.gather`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_NC: Tensor, index: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(positions, offsets)
        return x_NC.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient_LC: Tensor) -> tuple[Tensor, None, None, None]:
        positions, offsets = ctx.saved_tensors
        return _sum_rows(gradient_LC.contiguous(), positions, offsets), None, None, None


class _SumByRow(torch.autograd.Function):
    """Autograd function of `RowSelection.sum_by_row`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_LC: Tensor, index: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return _sum_rows(x_LC.contiguous(), positions, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient_NC: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return gradient_NC.index_select(0, index), None, None, None
