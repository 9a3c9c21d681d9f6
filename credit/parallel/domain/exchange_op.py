"""Exchange of cells as one operator of torch, which `torch.compile` puts into its graphs as a whole.

Shape suffixes: B batch, H and W rows and columns of a rank's cells, C channels.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor


class Exchange(Protocol):
    """Object that the operator calls; see `credit.parallel.domain.exchange.CellExchange`."""

    input_shape: tuple[int, int]
    output_shape: tuple[int, int]

    def move(self, x_BHWC: Tensor) -> Tensor:
        """Collective: return the needed cells."""

    def move_gradient(self, gradient_BHWC: Tensor) -> Tensor:
        """Collective: return the gradient of the held cells from that of the needed cells."""


# An operator takes numbers, but no objects of Python. So each exchange has a number by which the operator finds it.
_exchanges: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()
_ids = itertools.count()


def register_exchange(exchange: Exchange) -> int:
    """Return the number by which `exchange_cells` knows an exchange, as long as the exchange exists."""
    exchange_id = next(_ids)
    _exchanges[exchange_id] = exchange
    return exchange_id


@torch.library.custom_op("credit::exchange_cells", mutates_args=())
def exchange_cells(x_BHWC: Tensor, exchange_id: int) -> Tensor:
    """Collective: return the cells that this rank needs, with a gradient.

    Args:
        x_BHWC: cells that this rank holds.
        exchange_id: number of the exchange, see `register_exchange`.
    """
    return _exchanges[exchange_id].move(x_BHWC)


@torch.library.custom_op("credit::exchange_gradient", mutates_args=())
def _exchange_gradient(gradient_BHWC: Tensor, exchange_id: int) -> Tensor:
    """Collective: return the gradient of the held cells from that of the needed cells."""
    return _exchanges[exchange_id].move_gradient(gradient_BHWC)


@exchange_cells.register_fake
def _describe_cells(x_BHWC: Tensor, exchange_id: int) -> Tensor:
    """Return a tensor of the shape of the result, for the trace of a graph."""
    return x_BHWC.new_empty(x_BHWC.shape[0], *_exchanges[exchange_id].output_shape, x_BHWC.shape[3])


@_exchange_gradient.register_fake
def _describe_gradient(gradient_BHWC: Tensor, exchange_id: int) -> Tensor:
    """Return a tensor of the shape of the result, for the trace of a graph."""
    return gradient_BHWC.new_empty(gradient_BHWC.shape[0], *_exchanges[exchange_id].input_shape, gradient_BHWC.shape[3])


def _save_exchange(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, int], output: Tensor) -> None:
    """Save what the backward pass needs."""
    _, ctx.exchange_id = inputs


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient_BHWC: Tensor) -> tuple[Tensor, None]:
    """Return the gradients of the arguments of `exchange_cells`."""
    return _exchange_gradient(gradient_BHWC, ctx.exchange_id), None


exchange_cells.register_autograd(_backward, setup_context=_save_exchange)
