"""Products of linear layers that keep less for the backward pass than torch's own.

What is cheap is computed again there: GELU, and where memory is dear the layer norm before a linear layer and all that
lies between the two linear layers of a perceptron. Shape suffixes: N rows, C channels, K hidden channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.models.kernels.autocast import without_autocast
from credit.models.kernels.dispatch import use_cpu_kernels
from credit.models.kernels.recompute_cache import recall

# bytes of hidden channels that a core of a CPU works on at a time, where there is a backward pass that makes them again
IN_CACHE = 2**21
# and all cores where there is none: in the smaller blocks a perceptron takes 2 to 9 % longer
WITHOUT_GRADIENT = 2**26

Operands = tuple[Tensor, Tensor, Tensor | None]
# weight and bias
Layer = tuple[Tensor, Tensor | None]


def outside_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a backward function compute in its tensors' dtypes, also where it is called under autocast."""

    @functools.wraps(backward)
    def computed(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        with without_autocast(gradients[0]):
            return backward(ctx, *gradients)

    return computed


class RecomputeLinear(nn.Linear):
    """A linear layer whose caller may name another product of input, weight and bias than `F.linear`."""

    def forward(self, x: Any, product: Callable[..., Any] = F.linear) -> Any:
        """Return product(x, weight, bias); of `F.linear` (..., out_features)."""
        return product(x, self.weight, self.bias)


def operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> Operands:
    """Return the arguments: a product that is left to the layer behind, see `perceptron`."""
    return x, weight, bias


@dataclass(frozen=True)
class RecomputedNorm:
    """What a layer norm's result is made from, to be made again in a backward pass; nothing here has a gradient.

    Attributes:
        x: the norm's input (..., C).
        weight: its weight (C,).
        bias: its bias (C,).
        eps: its epsilon.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def where_it_pays(cls, norm: nn.LayerNorm, x: Tensor) -> RecomputedNorm | None:
        """Return what makes norm(x) again, or None where that had better be kept.

        It pays in float32 on a CPU, not in bfloat16, where the same work is a larger part of a step and frees half as
        much (benchmarks/lab_notes.md), nor where there is no backward pass. The compiler itself chooses what to compute
        again.
        """
        if not torch.is_grad_enabled():
            return None
        narrow = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if torch.compiler.is_compiling() or narrow or x.dtype != torch.float32 or not use_cpu_kernels(x):
            return None
        return cls(x.detach(), norm.weight.detach(), norm.bias.detach(), norm.eps)


def norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, again: RecomputedNorm, arrange: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return F.linear(x, weight, bias) for x = arrange(norm(y)), (..., out), without keeping x.

    Args:
        x: (..., C).
        weight: (out, C).
        bias: (out,).
        again: what norm(y) is made from.
        arrange: puts cells of norm(y) into other places.
    """
    return _LinearOfNorm.apply(x, weight, bias, arrange, again.eps, again.x, again.weight, again.bias)


def perceptron(first: Operands, weight: Tensor, bias: Tensor | None, again: RecomputedNorm | None) -> Tensor:
    """Return F.linear(F.gelu(F.linear(*first)), weight, bias), (..., out).

    Of what is K wide GELU's argument alone is kept. With `again`, rows are computed in blocks that fit into a core's
    cache, and neither that nor x is kept.

    Args:
        first: x = norm(y) (..., C), with the first layer's weight (K, C) and bias (K,).
        weight: (out, K).
        bias: (out,).
        again: what x is made from, if it is to be made again.
    """
    if torch.compiler.is_compiling():
        return F.linear(F.gelu(F.linear(*first)), weight, bias)
    given, device = (*first, weight, bias), weight.device.type
    if not weight.is_meta and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        given = tuple(None if tensor is None else tensor.to(dtype) for tensor in given)
    if again is None and not torch.is_grad_enabled() and use_cpu_kernels(weight):
        x = given[0]
        y_NC = _computed(x.flatten(0, -2), given[1:3], given[3:], WITHOUT_GRADIENT)
        return y_NC.view(*x.shape[:-1], -1)
    if again is None:
        return _Perceptron.apply(*given, 0.0)
    return _Perceptron.apply(*given, again.eps, again.x, again.weight, again.bias)


class _LinearOfNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arrange: Callable[[Tensor], Tensor],
        eps: float,
        *sources: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(weight, *sources)
        ctx.arrange, ctx.eps = arrange, eps
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, *sources = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        rows_NK = gradient.flatten(0, -2)
        found: list[Tensor | None] = [gradient @ weight if of_x else None, None, None]
        if of_weight:
            found[1] = rows_NK.t() @ ctx.arrange(_norm(*sources, ctx.eps)).flatten(0, -2)
        if of_bias:
            found[2] = rows_NK.sum(0)
        return *found, None, None, *(None for _ in sources)


class _Perceptron(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        first: Tensor,
        first_bias: Tensor | None,
        second: Tensor,
        second_bias: Tensor | None,
        eps: float,
        *sources: Tensor,
    ) -> Tensor:
        ctx.eps, ctx.given = eps, len(sources)
        shape, x_NC = x.shape[:-1], x.flatten(0, -2)
        if sources:
            ctx.save_for_backward(first, second, first_bias, *sources)
            (y_NC,) = recall(lambda: (_computed(x_NC, (first, first_bias), (second, second_bias), _in_cache()),))
            return y_NC.view(*shape, -1)
        argument_NK = F.linear(x_NC, first, first_bias)
        ctx.save_for_backward(first, second, argument_NK, x_NC)
        return F.linear(F.gelu(argument_NK), second, second_bias).view(*shape, -1)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        first, second, bias_or_argument, x, *affine = ctx.saved_tensors
        of_x, of_first, of_first_bias, of_second, of_second_bias = ctx.needs_input_grad[:5]
        source_NC, gradient_NC = x.flatten(0, -2), gradient.flatten(0, -2)
        of_rows: list[Tensor] = []
        of_weights: list[Tensor | None] = [None] * 4
        for rows in _row_blocks(source_NC, first, _in_cache() if ctx.given else None):
            part_NC = gradient_NC[rows]
            if ctx.given:
                x_NC = _norm(source_NC[rows], *affine, ctx.eps)
                argument_NK = F.linear(x_NC, first, bias_or_argument)
            else:
                x_NC, argument_NK = source_NC, bias_or_argument
            of_argument_NK = torch.ops.aten.gelu_backward(part_NC @ second, argument_NK)
            if of_x:
                of_rows.append(of_argument_NK @ first)
            of_weights = [
                _plus(of_weights[0], of_argument_NK.t() @ x_NC) if of_first else None,
                _plus(of_weights[1], of_argument_NK.sum(0)) if of_first_bias else None,
                _plus(of_weights[2], part_NC.t() @ F.gelu(argument_NK)) if of_second else None,
                _plus(of_weights[3], part_NC.sum(0)) if of_second_bias else None,
            ]
        of_x = _joined(of_rows).view(*gradient.shape[:-1], -1) if of_x else None
        return of_x, *of_weights, None, *(None for _ in range(ctx.given))


def _computed(x_NC: Tensor, first: Layer, second: Layer, most: int) -> Tensor:
    """Return the perceptron of rows, in blocks with at most so many bytes of hidden channels."""
    blocks = _row_blocks(x_NC, first[0], most)
    return _joined([F.linear(F.gelu(F.linear(x_NC[rows], *first)), *second) for rows in blocks])


def _norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _row_blocks(x_NC: Tensor, first: Tensor, most: int | None) -> list[slice]:
    """Return the rows that are worked on together, with at most so many bytes of hidden channels; None for all."""
    rows, hidden_bytes = max(len(x_NC), 1), x_NC.element_size() * len(x_NC) * len(first)
    size = -(-rows // max(-(-hidden_bytes // most), 1)) if most else rows
    return [slice(start, start + size) for start in range(0, rows, size)]


def _in_cache() -> int:
    return IN_CACHE * torch.get_num_threads()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    """Add what a block of rows gives to a weight, in place."""
    return part if total is None else total.add_(part)
