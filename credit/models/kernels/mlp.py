"""MLP kernels (linear, GELU, linear) that save fewer tensors for the backward pass than the operators of torch.

The hidden channels are the largest tensors of a transformer layer. The operators of torch save them twice: as input of
GELU, and as input of the second layer. `_MlpSavingGeluInput` saves only the input of GELU. `_MlpOfNorm` does not save
hidden channels. It follows a layer norm, and its backward pass computes the norm and the hidden channels again. It
works on blocks of rows, so that the hidden channels of a block fit into the cache of the CPU.

Shape suffixes: N rows (all cells of the batch), C channels, K hidden channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.models.kernels.autocast import autocast_dtype, backward_without_autocast
from credit.models.kernels.dispatch import MLP, is_cpu_path, uses_kernel
from credit.models.kernels.recompute_cache import cache_across_recompute
from credit.models.kernels.recompute_linear import DeferredLinear, RecomputedNorm

# Bytes of hidden channels per core in a block, for a forward pass with gradients: they fit into the cache of the core.
BYTES_PER_CORE = 2**21
# Total bytes of hidden channels in a block, for a forward pass without gradients. With smaller blocks, a layer takes 2
# to 9 % longer.
BYTES_WITHOUT_GRADIENT = 2**26


def mlp(expand: DeferredLinear, weight: Tensor, bias: Tensor | None, norm: RecomputedNorm | None = None) -> Tensor:
    """Return F.linear(F.gelu(F.linear(x, expand_weight, expand_bias)), weight, bias).

    Args:
        expand: input x (..., C), weight (K, C) and bias (K,) or None of the first layer, from `defer_product`.
        weight: weight (out, K) of the second layer.
        bias: bias (out,) of the second layer; None for a layer without bias.
        norm: layer norm with the result x, so that the backward pass can compute x again; None to save x instead.

    Returns:
        (..., out).
    """
    tensors = (*expand, weight, bias)
    if not uses_kernel(MLP, weight):
        return mlp_plain(*tensors)
    dtype = autocast_dtype(weight)
    if dtype is not None:
        # The backward pass of the kernels runs without autocast and uses the saved arguments, so the arguments are cast
        # here. A bias may be None.
        cast_tensors: list[Tensor | None] = []
        for tensor in tensors:
            cast_tensors.append(None if tensor is None else tensor.to(dtype))
        tensors = tuple(cast_tensors)
    if norm is not None:
        return _MlpOfNorm.apply(norm, *tensors)
    # Without gradients, no tensors are saved. On a CPU, computing in blocks then limits the memory of hidden channels.
    if not torch.is_grad_enabled() and is_cpu_path(weight):
        return _mlp_in_blocks(*tensors, BYTES_WITHOUT_GRADIENT)
    return _MlpSavingGeluInput.apply(*tensors)


def mlp_plain(
    x: Tensor, expand_weight: Tensor, expand_bias: Tensor | None, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Plain formulation of `mlp`, with the operators of torch."""
    return F.linear(F.gelu(F.linear(x, expand_weight, expand_bias)), weight, bias)


class _MlpSavingGeluInput(torch.autograd.Function):
    """Autograd function of an MLP that saves the input of GELU for the backward pass, but not the output of GELU."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        expand_weight: Tensor,
        expand_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        x_NC = x.flatten(0, -2)
        hidden_NK = F.linear(x_NC, expand_weight, expand_bias)
        ctx.save_for_backward(x_NC, hidden_NK, expand_weight, weight)
        y_NC = F.linear(F.gelu(hidden_NK), weight, bias)
        return y_NC.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    @backward_without_autocast
    def backward(ctx: FunctionCtx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, hidden_NK, expand_weight, weight = ctx.saved_tensors
        grad_x_NC, *weight_gradients = _compute_gradients(
            ctx.needs_input_grad, grad_y.flatten(0, -2), x_NC, hidden_NK, expand_weight, weight
        )
        grad_x = None if grad_x_NC is None else grad_x_NC.view(*grad_y.shape[:-1], -1)
        return grad_x, *weight_gradients


class _MlpOfNorm(torch.autograd.Function):
    """Autograd function of an MLP after a layer norm. Of the activations it saves only the input of the norm.

    It computes one block of rows at a time, so that the hidden channels fit into the CPU cache.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        norm: RecomputedNorm,
        x: Tensor,
        expand_weight: Tensor,
        expand_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(expand_weight, expand_bias, weight, norm.x, norm.weight, norm.bias)
        ctx.norm_eps = norm.eps

        def compute() -> tuple[Tensor]:
            return (_mlp_in_blocks(x, expand_weight, expand_bias, weight, bias, _find_cache_bytes()),)

        (y,) = cache_across_recompute(compute)
        return y

    @staticmethod
    @once_differentiable
    @backward_without_autocast
    def backward(ctx: FunctionCtx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        expand_weight, expand_bias, weight, norm_input, norm_weight, norm_bias = ctx.saved_tensors
        norm_input_NC = norm_input.flatten(0, -2)
        grad_y_NC = grad_y.flatten(0, -2)
        grad_x_blocks: list[Tensor | None] = []
        weight_gradients: list[Tensor | None] = [None] * 4
        for rows in _divide_rows(norm_input_NC, expand_weight, _find_cache_bytes()):
            # Compute the result of the norm and the hidden channels of the block again.
            x_NC = F.layer_norm(norm_input_NC[rows], norm_weight.shape, norm_weight, norm_bias, ctx.norm_eps)
            hidden_NK = F.linear(x_NC, expand_weight, expand_bias)
            # The first argument of forward is the norm, which has no gradient.
            grad_x_NC, *block_gradients = _compute_gradients(
                ctx.needs_input_grad[1:], grad_y_NC[rows], x_NC, hidden_NK, expand_weight, weight
            )
            grad_x_blocks.append(grad_x_NC)
            # The gradients of the weights are sums over the blocks of rows.
            for i, gradient in enumerate(block_gradients):
                if weight_gradients[i] is None:
                    weight_gradients[i] = gradient
                else:
                    weight_gradients[i].add_(gradient)
        grad_x = None
        if ctx.needs_input_grad[1]:
            grad_x = _concatenate_rows(grad_x_blocks).view(*grad_y.shape[:-1], -1)
        return None, grad_x, *weight_gradients


def _compute_gradients(
    needs_grad: Sequence[bool],
    grad_y_NC: Tensor,
    x_NC: Tensor,
    hidden_NK: Tensor,
    expand_weight: Tensor,
    weight: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, first weight, first bias, second weight and second bias; None for unneeded gradients.

    Args:
        needs_grad: True for each needed gradient, in the order of the results.
        grad_y_NC: gradient of the output of the MLP.
        x_NC: input of the MLP.
        hidden_NK: input of GELU.
        expand_weight: weight of the first layer.
        weight: weight of the second layer.
    """
    needs_grad_x, needs_grad_expand_weight, needs_grad_expand_bias, needs_grad_weight, needs_grad_bias = needs_grad
    grad_x_NC = grad_expand_weight = grad_expand_bias = grad_weight = grad_bias = None
    grad_hidden_NK = torch.ops.aten.gelu_backward(grad_y_NC @ weight, hidden_NK)
    if needs_grad_x:
        grad_x_NC = grad_hidden_NK @ expand_weight
    if needs_grad_expand_weight:
        grad_expand_weight = grad_hidden_NK.t() @ x_NC
    if needs_grad_expand_bias:
        grad_expand_bias = grad_hidden_NK.sum(0)
    if needs_grad_weight:
        grad_weight = grad_y_NC.t() @ F.gelu(hidden_NK)
    if needs_grad_bias:
        grad_bias = grad_y_NC.sum(0)
    return grad_x_NC, grad_expand_weight, grad_expand_bias, grad_weight, grad_bias


def _mlp_in_blocks(
    x: Tensor,
    expand_weight: Tensor,
    expand_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    block_bytes: int,
) -> Tensor:
    """Return the result of `mlp_plain`, computed in blocks of rows with at most `block_bytes` of hidden channels."""
    x_NC = x.flatten(0, -2)
    y_blocks = []
    for rows in _divide_rows(x_NC, expand_weight, block_bytes):
        y_blocks.append(mlp_plain(x_NC[rows], expand_weight, expand_bias, weight, bias))
    return _concatenate_rows(y_blocks).view(*x.shape[:-1], -1)


def _divide_rows(x_NC: Tensor, expand_weight: Tensor, block_bytes: int) -> list[slice]:
    """Return slices of about equal length that divide the rows, each with at most `block_bytes` of hidden channels.

    Args:
        x_NC: input of the MLP.
        expand_weight: (K, C) weight of the first layer.
        block_bytes: upper limit for the hidden channels of a block, in bytes.
    """
    # An empty tensor has one block, so that the list of results is not empty.
    num_rows = max(len(x_NC), 1)
    # `-(-a // b)` is a / b, rounded up.
    hidden_bytes = x_NC.element_size() * len(x_NC) * len(expand_weight)
    num_blocks = max(-(-hidden_bytes // block_bytes), 1)
    rows_per_block = -(-num_rows // num_blocks)
    return [slice(start, start + rows_per_block) for start in range(0, num_rows, rows_per_block)]


def _find_cache_bytes() -> int:
    """Return the number of bytes of hidden channels that fit into the caches of all used cores."""
    return BYTES_PER_CORE * torch.get_num_threads()


def _concatenate_rows(blocks: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all blocks to one tensor; a single block is returned without a copy."""
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)
