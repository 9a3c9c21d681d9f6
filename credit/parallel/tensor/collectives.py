"""Differentiable collectives of tensor parallelism, traceable by torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor


class SumGradient(torch.autograd.Function):
    """Identity whose gradient is the sum over the ranks: the input of parts that each rank holds alone."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _summed(gradient, ctx.group)


class Sum(torch.autograd.Function):
    """Sum over the ranks whose gradient is handed to each rank as it is."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Total(torch.autograd.Function):
    """Sum over the ranks of which each rank uses the result for its own part: the gradient is summed, too."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _summed(gradient, ctx.group)


@dataclass(frozen=True)
class FusedRoutes:
    """Routes of a fused weight's rows from the ranks that store them to the ranks that compute with them.

    The rows of all ranks together are `parts` equal parts, one behind the other, such as gate and up. Rank r of n holds
    the r-th of n pieces of the whole. It computes with the r-th of n pieces of every part. So 1 / (n * parts) of the
    rows, a piece of a part, goes to one rank as a whole.

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
    """Return the routes of a weight of `rows` rows on all ranks together, which both factors of its pieces divide."""
    ranks, rank = group.size(), group.rank()
    # The pieces of all ranks are numbered as they lie in the whole: rank r holds pieces r * parts and following.
    destinations = [(rank * parts + piece) % ranks for piece in range(parts)]
    sources = [(part * ranks + rank) // parts for part in range(parts)]
    piece_rows = rows // (ranks * parts)
    return FusedRoutes(
        order=tuple(sorted(range(parts), key=lambda piece: destinations[piece])),
        sent=tuple(piece_rows * destinations.count(other) for other in range(ranks)),
        received=tuple(piece_rows * sources.count(other) for other in range(ranks)),
        group=group,
    )


class DealFusedRows(torch.autograd.Function):
    """Each rank's share of every fused part of a weight, from the rows that it stores; see `FusedRoutes`."""

    @staticmethod
    def forward(ctx, rows: Tensor, routes: FusedRoutes) -> Tensor:
        ctx.routes = routes
        pieces = rows.chunk(len(routes.order))
        sent = torch.cat([pieces[piece] for piece in routes.order])
        return _exchanged(sent, routes.received, routes.sent, routes.group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        routes = ctx.routes
        pieces = _exchanged(gradient, routes.sent, routes.received, routes.group).chunk(len(routes.order))
        return torch.cat([pieces[routes.order.index(piece)] for piece in range(len(pieces))]), None


def _exchanged(x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows received from all ranks, in the order of ranks."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_to_all_single(x, list(received), list(sent), group))
    result = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(result, x, list(received), list(sent), group=group)
    return result


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks, a new tensor."""
    if torch.compiler.is_compiling():
        # the sum in place is traced, too, but in torch 2.11 every gradient before it is lost, without an error
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x
