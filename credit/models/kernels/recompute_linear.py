"""Linear layers with an exchangeable product function, and product functions that save less for the backward pass.

A kernel for several layers needs the weights of these layers. But spectral norm, adapters, sharding and tensor
parallelism prepare the weight of a layer only when the layer is called. So the layer is called in the usual way, and
the caller passes the function that multiplies input and weight.

Shape suffixes: N rows (all cells of the batch), C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.models.kernels.autocast import backward_without_autocast
from credit.models.kernels.dispatch import RECOMPUTED_NORM, uses_kernel

# Input, weight and bias of a linear layer whose product a later layer computes.
DeferredLinear = tuple[Tensor, Tensor, Tensor | None]


class CustomProductLinear(nn.Linear):
    """Linear layer that accepts a function that multiplies input and weight.

    With this function, a single kernel can compute the product and further layers, see `credit.models.kernels.mlp`.
    """

    # Tensor parallelism may replace `forward`, because `forward` only calls `product`.
    _tp_takes_product = True

    def forward(self, x: Any, product: Callable[..., Any] = F.linear) -> Any:
        """Return product(x, weight, bias).

        Args:
            x: (..., in_features), or a different object that is a valid first argument of `product`.
            product: function of (x, weight, bias), by default the linear map to (..., out_features).
        """
        return product(x, self.weight, self.bias)


def defer_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLinear:
    """Return the arguments unchanged, so that a later layer can compute the product.

    This function is an argument `product` of `CustomProductLinear.forward`, see `credit.models.kernels.mlp`.
    """
    return x, weight, bias


@dataclass(frozen=True)
class RecomputedNorm:
    """Detached tensors from which a backward pass computes the result of a layer norm again.

    Attributes:
        x: (..., C) input of the norm.
        weight: (C,) weight of the norm.
        bias: (C,) bias of the norm.
        eps: constant that the norm adds to the variance.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def build_if_worthwhile(cls, norm: nn.LayerNorm, x: Tensor) -> RecomputedNorm | None:
        """Return the tensors from which norm(x) can be recomputed; None if norm(x) should be saved instead.

        Recomputation is worthwhile in float32 on a CPU. In bfloat16 it takes a larger part of a step and frees half as
        much memory (benchmarks/lab_notes.md). Without gradients, the method returns None.

        Args:
            norm: the layer norm.
            x: (..., C) input of the norm.
        """
        if not torch.is_grad_enabled() or not uses_kernel(RECOMPUTED_NORM, x):
            return None
        return cls(x.detach(), norm.weight.detach(), norm.bias.detach(), norm.eps)


def norm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: RecomputedNorm, arrange: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return F.linear(x, weight, bias) without saving x; the backward pass computes x again.

    The plain formulation is `F.linear`.

    Args:
        x: (..., C), equal to ``arrange(layer_norm(norm.x))``.
        weight: (out, C).
        bias: (out,); None for a layer without bias.
        norm: input, weight and bias of the layer norm.
        arrange: function that rearranges the cells of the result of the norm in the order of x, for example into
            windows.

    Returns:
        (..., out).
    """
    return _NormLinear.apply(x, weight, bias, norm, arrange)


class _NormLinear(torch.autograd.Function):
    """Autograd function of a linear layer after a layer norm; it saves the input of the norm instead of its own input.

    The layer norm also saves this input, so the autograd function needs no additional memory.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: RecomputedNorm,
        arrange: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(weight, norm.x, norm.weight, norm.bias)
        ctx.arrange = arrange
        ctx.norm_eps = norm.eps
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    @backward_without_autocast
    def backward(ctx: FunctionCtx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        weight, norm_input, norm_weight, norm_bias = ctx.saved_tensors
        needs_grad_x, needs_grad_weight, needs_grad_bias = ctx.needs_input_grad[:3]
        grad_y_NC = grad_y.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if needs_grad_x:
            grad_x = grad_y @ weight
        if needs_grad_weight:
            # Compute the input of the linear layer in the forward pass again.
            normed = F.layer_norm(norm_input, norm_weight.shape, norm_weight, norm_bias, ctx.norm_eps)
            x_NC = ctx.arrange(normed).flatten(0, -2)
            grad_weight = grad_y_NC.t() @ x_NC
        if needs_grad_bias:
            grad_bias = grad_y_NC.sum(0)
        return grad_x, grad_weight, grad_bias, None, None
