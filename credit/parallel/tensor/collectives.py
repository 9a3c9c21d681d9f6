"""Differentiable collectives of tensor parallelism that torch.compile can trace.

Every rank of the group must call these functions, in both the forward pass and the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor


class AllReduceBackward(torch.autograd.Function):
    """Collective: identity in the forward pass, sum of the gradient over the ranks in the backward pass.

    Apply this function to the common input of layers that are split by outputs. Its name in Megatron-LM is f
    (Shoeybi et al. 2019, arXiv 1909.08053).
    """

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        return None, sum_over_ranks(gradient, ctx.group)


class AllReduceForward(torch.autograd.Function):
    """Collective: sum over the ranks in the forward pass, identity in the backward pass.

    Apply this function to the outputs of layers that are split by inputs. Its name in Megatron-LM is g
    (Shoeybi et al. 2019, arXiv 1909.08053).
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class AllReduceBothWays(torch.autograd.Function):
    """Collective: sum over the ranks in the forward pass, and sum of the gradient in the backward pass.

    Apply this function to a sum that each rank uses to compute its part of a tensor, such as sigma of spectral norm.
    """

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        return None, sum_over_ranks(gradient, ctx.group)


@dataclass(frozen=True)
class FusedRowRoutes:
    """Numbers of rows of a fused weight that a rank sends to and receives from each rank.

    The rows are sent from the ranks that store them to the ranks that compute with them.

    The rows of the whole weight consist of p equal fused parts, one after the other, such as gate and up. With n ranks,
    rank r stores the r-th of n consecutive blocks of all rows, but computes with the r-th of n blocks of every part.
    Rows are exchanged in pieces of 1 / (n * p) of all rows, because a piece of this size belongs to a single rank
    before and after the exchange.

    Attributes:
        piece_order: indices of this rank's pieces in the order in which they are sent, sorted by destination.
        num_rows_sent: number of rows that this rank sends to each rank.
        num_rows_received: number of rows that this rank receives from each rank, in the order of parts.
        group: the tensor-parallel ranks.
    """

    piece_order: tuple[int, ...]
    num_rows_sent: tuple[int, ...]
    num_rows_received: tuple[int, ...]
    group: dist.ProcessGroup


def plan_fused_row_routes(rows: int, parts: int, group: dist.ProcessGroup) -> FusedRowRoutes:
    """Return the numbers of rows of a fused weight that this rank sends to and receives from each rank.

    Args:
        rows: number of rows of the whole weight, a multiple of `parts` times the number of ranks.
        parts: number of equal fused parts of the rows.
        group: the tensor-parallel ranks.
    """
    num_ranks = group.size()
    rank = group.rank()
    piece_rows = rows // (num_ranks * parts)
    # Pieces are numbered by their position in the whole weight. Each rank stores `parts` pieces, so piece p is stored
    # by rank p // parts. Each part has one piece for each rank, so piece p is used by rank p % num_ranks.
    destinations = [(rank * parts + piece) % num_ranks for piece in range(parts)]
    sources = [(part * num_ranks + rank) // parts for part in range(parts)]
    piece_order = sorted(range(parts), key=lambda piece: destinations[piece])
    num_rows_sent = [piece_rows * destinations.count(other) for other in range(num_ranks)]
    num_rows_received = [piece_rows * sources.count(other) for other in range(num_ranks)]
    return FusedRowRoutes(tuple(piece_order), tuple(num_rows_sent), tuple(num_rows_received), group)


class ExchangeFusedRows(torch.autograd.Function):
    """Collective: exchange of rows, after which each rank has its share of every fused part of a weight.

    The input (rows / ranks, ...) contains the rows that this rank stores. The output of the same shape contains the
    rows with which this rank computes. See `FusedRowRoutes`.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, routes: FusedRowRoutes) -> Tensor:
        ctx.routes = routes
        pieces = rows.chunk(len(routes.piece_order))
        ordered_rows = torch.cat([pieces[piece] for piece in routes.piece_order])
        return _exchange_rows(ordered_rows, routes.num_rows_received, routes.num_rows_sent, routes.group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        # The gradient is sent back to the ranks that store the rows, and its pieces are sorted into the stored order.
        routes = ctx.routes
        ordered_gradient = _exchange_rows(gradient, routes.num_rows_sent, routes.num_rows_received, routes.group)
        pieces = ordered_gradient.chunk(len(routes.piece_order))
        stored_order = [pieces[routes.piece_order.index(piece)] for piece in range(len(pieces))]
        return torch.cat(stored_order), None


def _exchange_rows(
    x: Tensor, num_rows_received: Sequence[int], num_rows_sent: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Collective: send rows to all ranks, and return the received rows in the order of ranks.

    Args:
        x: (rows, ...) rows that this rank sends, sorted by destination rank.
        num_rows_received: number of rows that this rank receives from each rank.
        num_rows_sent: number of rows that this rank sends to each rank.
        group: the tensor-parallel ranks.
    """
    x = x.contiguous()
    # Functional collectives return a new tensor, which torch.compile can trace.
    if torch.compiler.is_compiling():
        exchanged = functional.all_to_all_single(x, list(num_rows_received), list(num_rows_sent), group)
        return functional.wait_tensor(exchanged)
    result = x.new_empty((sum(num_rows_received), *x.shape[1:]))
    dist.all_to_all_single(result, x, list(num_rows_received), list(num_rows_sent), group=group)
    return result


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective: return the elementwise sum of a tensor over the ranks as a new tensor."""
    if torch.compiler.is_compiling():
        # An in-place sum can be traced as well, but torch 2.11 then silently loses all gradients of earlier operations.
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x
