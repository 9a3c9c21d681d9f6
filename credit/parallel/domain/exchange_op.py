"""Exchange of cells as a custom torch operator, which `torch.compile` keeps as one node of its graphs.

Shape suffixes: B batch, H and W rows and columns of a rank's cells, C channels.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor


class Exchange(Protocol):
    """Interface of the exchange that the operator calls; see `credit.parallel.domain.exchange.CellExchange`."""

    input_shape: tuple[int, int]
    output_shape: tuple[int, int]

    def move(self, x_BHWC: Tensor) -> Tensor:
        """Collective: exchange cells without a gradient, and return the cells that this rank needs."""

    def move_gradient(self, gradient_BHWC: Tensor) -> Tensor:
        """Collective: return the gradient of the held cells, given the gradient of the needed cells."""


# The arguments of an operator may be numbers, but not Python objects. Each exchange therefore gets a number, with which
# the operator finds the exchange.
_exchanges: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()
_ids = itertools.count()


def register_exchange(exchange: Exchange) -> int:
    """Register an exchange for `exchange_cells`; return its number, which is valid while the exchange exists."""
    exchange_id = next(_ids)
    _exchanges[exchange_id] = exchange
    return exchange_id


@torch.library.custom_op("credit::exchange_cells", mutates_args=())
def exchange_cells(x_BHWC: Tensor, exchange_id: int) -> Tensor:
    """Collective: exchange cells with a gradient, and return the cells that this rank needs.

    Args:
        x_BHWC: cells of this rank, the input of the exchange.
        exchange_id: number of the exchange, see `register_exchange`.
    """
    return _exchanges[exchange_id].move(x_BHWC)


@torch.library.custom_op("credit::exchange_gradient", mutates_args=())
def _exchange_gradient(gradient_BHWC: Tensor, exchange_id: int) -> Tensor:
    """Collective: return the gradient of the held cells, given the gradient of the needed cells."""
    return _exchanges[exchange_id].move_gradient(gradient_BHWC)


@exchange_cells.register_fake
def _build_fake_cells(x_BHWC: Tensor, exchange_id: int) -> Tensor:
    """Return an empty tensor with the shape of the result of `exchange_cells`, for tracing."""
    return x_BHWC.new_empty(x_BHWC.shape[0], *_exchanges[exchange_id].output_shape, x_BHWC.shape[3])


@_exchange_gradient.register_fake
def _build_fake_gradient(gradient_BHWC: Tensor, exchange_id: int) -> Tensor:
    """Return an empty tensor with the shape of the result of `_exchange_gradient`, for tracing."""
    return gradient_BHWC.new_empty(gradient_BHWC.shape[0], *_exchanges[exchange_id].input_shape, gradient_BHWC.shape[3])


def _save_exchange_id(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, int], output: Tensor) -> None:
    """Save the number of the exchange for the backward pass."""
    _, ctx.exchange_id = inputs


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient_BHWC: Tensor) -> tuple[Tensor, None]:
    """Return the gradients of the arguments of `exchange_cells`."""
    return _exchange_gradient(gradient_BHWC, ctx.exchange_id), None


exchange_cells.register_autograd(_backward, setup_context=_save_exchange_id)
