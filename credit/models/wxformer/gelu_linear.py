"""A linear layer of the GELU of its input, which keeps the input alone for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class ProductLinear(nn.Linear):
    """A linear layer whose caller may name another product of input, weight and bias than `F.linear`."""

    def forward(self, x: Tensor, product: Product = F.linear) -> Tensor:
        """Return product(x, weight, bias), (..., out_features)."""
        return product(x, self.weight, self.bias)


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear(F.gelu(x), weight, bias), (..., out).

    GELU is computed again in the backward pass. Its value would otherwise be kept beside its input, and inside a
    transformer layer both are four times as wide as the tokens.
    """
    if torch.compiler.is_compiling():
        return F.linear(F.gelu(x), weight, bias)  # the compiler itself chooses what to compute again
    device = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _GeluLinear.apply(x, weight, bias)


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(F.gelu(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            torch.ops.aten.gelu_backward(gradient @ weight, x) if of_x else None,
            rows.t() @ F.gelu(x).flatten(0, -2) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
