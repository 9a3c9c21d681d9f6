"""Gathers along edges and sums over edges, whose backward passes are sums and gathers.

Both are deterministic on every device: the rows of each sum are listed one after the other, and torch's embedding bag
adds up listed rows in their order. With the scatter operators of torch, threads of a GPU would add to one element in
any order.

Shape suffixes: B batch, E edges, S senders, R receivers, L listed rows, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class Selection(NamedTuple):
    """Rows that are read from a tensor, and the reverse: where each row of the tensor is read.

    The reverse is in compressed sparse row form (CSR).

    Attributes:
        index: (L,) index of each row that is read.
        positions: the positions in `index`, sorted by the row that is read there.
        offsets: (rows of the tensor,) index into `positions` at which those of a row begin.
    """

    index: Tensor
    positions: Tensor
    offsets: Tensor

    @classmethod
    def build(cls, index: np.ndarray, num_rows: int, is_used: np.ndarray | None = None) -> Selection:
        """Return a selection on the CPU.

        Args:
            index: (L,) indices of the rows to read.
            num_rows: number of rows of the tensor.
            is_used: (L,) False where the row that is read has no effect, and so no gradient; None for all True.
        """
        positions = np.argsort(index, kind="stable")
        if is_used is not None:
            positions = positions[is_used[positions]]
        counts = np.bincount(index[positions], minlength=num_rows)
        offsets = np.cumsum(counts) - counts
        return cls(*(torch.from_numpy(array.astype(np.int64)) for array in (index, positions, offsets)))

    def repeat(self, batch: int) -> Selection:
        """Return the selection from the rows of a batch of tensors, one tensor after the other."""
        if batch == 1:
            return self
        return Selection(
            repeat_index(self.index, batch, len(self.offsets)),
            repeat_index(self.positions, batch, len(self.index)),
            repeat_index(self.offsets, batch, len(self.positions)),
        )

    def gather(self, x_BNC: Tensor) -> Tensor:
        """Return the selected rows (B, L, C) of a batch of tensors; the selection must be that of a batch."""
        rows = _Gather.apply(x_BNC.flatten(0, 1), *self)
        return rows.view(len(x_BNC), -1, x_BNC.shape[-1])

    def sum(self, x_BLC: Tensor) -> Tensor:
        """Return for each of N rows the sum (B, N, C) over the positions that read it: the adjoint of `gather`."""
        sums = _Sum.apply(x_BLC.flatten(0, 1), *self)
        return sums.view(len(x_BLC), -1, x_BLC.shape[-1])


class EdgeIndex(NamedTuple):
    """Directed edges, sorted by receiver and then by sender.

    Attributes:
        senders: selection of the sender of each edge.
        receivers: selection of the receiver of each edge.
    """

    senders: Selection
    receivers: Selection

    @classmethod
    def build(cls, edges_E2: np.ndarray, num_senders: int, num_receivers: int) -> EdgeIndex:
        """Return the index, on the CPU, of edges that `sort_edges` has sorted.

        Args:
            edges_E2: edges as (sender, receiver).
            num_senders: number of nodes that may send.
            num_receivers: number of nodes that may receive.
        """
        senders, receivers = edges_E2.T
        return cls(Selection.build(senders, num_senders), Selection.build(receivers, num_receivers))

    def repeat(self, batch: int) -> EdgeIndex:
        """Return the edges of a batch of graphs, one graph after the other."""
        return EdgeIndex(self.senders.repeat(batch), self.receivers.repeat(batch))


def sort_edges(edges_E2: np.ndarray) -> np.ndarray:
    """Return edges (sender, receiver) sorted by receiver and then by sender, so that their order has no effect."""
    return edges_E2[np.lexsort((edges_E2[:, 0], edges_E2[:, 1]))]


def repeat_index(index: Tensor, batch: int, num_rows: int) -> Tensor:
    """Return indices (batch * L,) into a batch of tensors with `num_rows` rows each from indices into one tensor."""
    offsets = torch.arange(batch, device=index.device) * num_rows
    return (offsets[:, None] + index).flatten()


def _sum_rows(x_LC: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """Return (len(offsets), C) the sums of the rows that `positions` lists from each offset on; 0 for an empty list."""
    # This operator takes no part in autograd. `False`, 0 and `False` mean unscaled gradients, sums and dense gradients.
    return torch.ops.aten._embedding_bag_forward_only(x_LC, positions, offsets, False, 0, False)[0]


class _Gather(torch.autograd.Function):
    """Selection of rows; see `Selection`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_NC: Tensor, index: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(positions, offsets)
        return x_NC.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient_LC: Tensor) -> tuple[Tensor, None, None, None]:
        positions, offsets = ctx.saved_tensors
        return _sum_rows(gradient_LC.contiguous(), positions, offsets), None, None, None


class _Sum(torch.autograd.Function):
    """Sum over the positions that read a row; see `Selection`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_LC: Tensor, index: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return _sum_rows(x_LC.contiguous(), positions, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient_NC: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return gradient_NC.index_select(0, index), None, None, None
