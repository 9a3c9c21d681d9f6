"""Differentiable collectives of tensor parallelism, which torch.compile can trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor


class AllReduceBackward(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks: for the common input of split layers."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _sum_over_ranks(gradient, ctx.group)


class AllReduceForward(torch.autograd.Function):
    """Sum over the ranks whose gradient is passed on unchanged: for the outputs of split layers."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class AllReduceBothWays(torch.autograd.Function):
    """Sum over the ranks whose gradient is summed as well: for a sum that each rank uses for its own part."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return _sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _sum_over_ranks(gradient, ctx.group)


@dataclass(frozen=True)
class FusedRoutes:
    """Routes of the rows of a fused weight from the ranks that store them to the ranks that compute with them.

    The rows of all ranks are `parts` equal parts, one behind the other, such as gate and up. Rank r of n stores the
    r-th of n consecutive blocks of all rows, but computes with the r-th of n blocks of every part. Each part of a block
    is a piece of 1 / (n * parts) of all rows, and a piece goes to one rank as a whole.

    Attributes:
        order: this rank's pieces in the order in which they are sent, by destination.
        sent: number of rows for each rank.
        received: number of rows from each rank; they arrive in the order of parts.
        group: the ranks.
    """

    order: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: dist.ProcessGroup


def plan_fused_routes(rows: int, parts: int, group: dist.ProcessGroup) -> FusedRoutes:
    """Return the routes of a fused weight.

    Args:
        rows: rows of the whole weight, a multiple of `parts` times the number of ranks.
        parts: equal parts of the rows.
        group: the ranks.
    """
    ranks = group.size()
    rank = group.rank()
    # Pieces are numbered by their position in the whole weight: rank r stores the pieces from r * parts on.
    destinations = [(rank * parts + piece) % ranks for piece in range(parts)]
    sources = [(part * ranks + rank) // parts for part in range(parts)]
    piece_rows = rows // (ranks * parts)
    return FusedRoutes(
        order=tuple(sorted(range(parts), key=lambda piece: destinations[piece])),
        sent=tuple(piece_rows * destinations.count(other) for other in range(ranks)),
        received=tuple(piece_rows * sources.count(other) for other in range(ranks)),
        group=group,
    )


class ExchangeFusedRows(torch.autograd.Function):
    """Exchange of rows that gives each rank its share of every fused part of a weight; see `FusedRoutes`."""

    @staticmethod
    def forward(ctx, rows: Tensor, routes: FusedRoutes) -> Tensor:
        ctx.routes = routes
        pieces = rows.chunk(len(routes.order))
        sent = torch.cat([pieces[piece] for piece in routes.order])
        return _exchange_rows(sent, routes.received, routes.sent, routes.group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        routes = ctx.routes
        pieces = _exchange_rows(gradient, routes.sent, routes.received, routes.group).chunk(len(routes.order))
        return torch.cat([pieces[routes.order.index(piece)] for piece in range(len(pieces))]), None


def _exchange_rows(x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows received from all ranks, in the order of ranks."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_to_all_single(x, list(received), list(sent), group))
    result = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(result, x, list(received), list(sent), group=group)
    return result


def _sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks, a new tensor."""
    if torch.compiler.is_compiling():
        # A sum in place can be traced, too, but in torch 2.11 every gradient before it is lost without an error.
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x
