"""Scaled dot-product attention inside windows, with a trainable bias, and of all tokens, without a bias.

Shape suffixes: N windows of the complete batch, h heads, L positions in a window, d channels per head; M = N * h
(window, head) pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.models.kernels.autocast import backward_without_autocast
from credit.models.kernels.dispatch import ATTENTION, uses_kernel

# Number of float32 values in the longest vector register of a CPU.
VECTOR_LENGTH = 16


def attention(qkv_3NhLd: Tensor, bias_LL: Tensor, dropout: float = 0.0) -> Tensor:
    """Return softmax(q k^T / sqrt(d) + bias) v.

    Args:
        qkv_3NhLd: (3, N windows, h heads, L positions, d channels) queries, keys and values.
        bias_LL: (L, L) additive bias of query position i and key position j, the same for all windows and heads.
        dropout: probability of dropping an attention weight. With dropout, the plain formulation is used, because the
            CPU kernel has no dropout.

    Returns:
        Attention output (N, h, L, d), in the dtype of `qkv_3NhLd`.
    """
    if dropout == 0.0 and uses_kernel(ATTENTION, qkv_3NhLd):
        return sdpa_cpu(qkv_3NhLd, bias_LL)
    return sdpa(qkv_3NhLd, bias_LL, dropout)


def sdpa(qkv_3NhLd: Tensor, bias_LL: Tensor, dropout: float = 0.0) -> Tensor:
    """Plain formulation of `attention`, with the scaled dot-product attention of torch."""
    q_NhLd, k_NhLd, v_NhLd = qkv_3NhLd.unbind(0)
    return F.scaled_dot_product_attention(q_NhLd, k_NhLd, v_NhLd, attn_mask=bias_LL.to(q_NhLd.dtype), dropout_p=dropout)


def attention_without_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, with the scaled dot-product attention of torch.

    On a CPU, values in lower precision are computed in float32. In bfloat16, a forward and backward pass of torch 2.13
    takes two to ten times as long (benchmarks/lab_notes.md).

    Args:
        q: queries (..., L, d).
        k: keys (..., M, d).
        v: values (..., M, d).
        mask: True for each pair of query and key with attention, broadcast to (..., L, M); None for all pairs.

    Returns:
        Attention output (..., L, d), in the dtype of `q`.
    """
    if not uses_kernel(ATTENTION, q):
        return F.scaled_dot_product_attention(q, k, v, mask)
    dtype = _choose_compute_dtype(q)
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), mask).to(q.dtype)


def attention_with_changed_weights(
    qkv_3NhLd: Tensor, bias_LL: Tensor, change_weights: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return change_weights(softmax(q k^T / sqrt(d) + bias)) v, computed with elementary operators of torch.

    Args:
        qkv_3NhLd: (3, N windows, h heads, L positions, d channels) queries, keys and values.
        bias_LL: (L, L) additive bias of query position i and key position j, the same for all windows and heads.
        change_weights: function of the attention weights (N, h, L, L) that returns changed weights, such as dropout.

    Returns:
        Attention output (N, h, L, d), in the dtype of `qkv_3NhLd`.
    """
    q_NhLd, k_NhLd, v_NhLd = qkv_3NhLd.unbind(0)
    scores_NhLL = (q_NhLd * q_NhLd.shape[-1] ** -0.5) @ k_NhLd.mT + bias_LL
    weights_NhLL = torch.softmax(scores_NhLL, dim=-1).to(qkv_3NhLd.dtype)
    return change_weights(weights_NhLL) @ v_NhLd


def sdpa_cpu(qkv_3NhLd: Tensor, bias_LL: Tensor) -> Tensor:
    """CPU kernel of `attention` without dropout.

    Matrix products are computed in float32 or float64, as in the attention of torch.

    On a CPU, torch 2.13 has no fused attention with a gradient of the bias. Instead it uses operators that make scaled
    copies of queries and keys, and save these copies for the backward pass.
    """
    return _CpuAttention.apply(qkv_3NhLd, bias_LL)


class _CpuAttention(torch.autograd.Function):
    """Autograd function of attention that saves only its input and the attention weights for the backward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, qkv_3NhLd: Tensor, bias_LL: Tensor) -> Tensor:
        _, N, h, L, d = qkv_3NhLd.shape
        with torch.autocast("cpu", enabled=False):
            # `reshape` returns a view for a single head, otherwise a copy.
            qkv_3MLd = qkv_3NhLd.reshape(3, N * h, L, d)
            q_MLd, k_MLd, v_MLd = qkv_3MLd.to(_choose_compute_dtype(qkv_3MLd)).unbind(0)
            # One operator computes the product, its scale and the sum with the bias.
            scores_MLL = torch.baddbmm(bias_LL.to(q_MLd.dtype), q_MLd, k_MLd.mT, alpha=d**-0.5)
            weights_MLL = softmax_(scores_MLL)
            y_MLd = torch.bmm(weights_MLL, v_MLd)
        ctx.save_for_backward(qkv_3MLd, weights_MLL)
        ctx.qkv_shape = qkv_3NhLd.shape
        ctx.bias_dtype = bias_LL.dtype
        return y_MLd.view(N, h, L, d).to(qkv_3NhLd.dtype)

    @staticmethod
    @once_differentiable
    @backward_without_autocast
    def backward(ctx: FunctionCtx, grad_y_NhLd: Tensor) -> tuple[Tensor, Tensor]:
        qkv_3MLd, weights_MLL = ctx.saved_tensors
        dtype = _choose_compute_dtype(qkv_3MLd)
        q_MLd, k_MLd, v_MLd = qkv_3MLd.to(dtype).unbind(0)
        grad_y_MLd = grad_y_NhLd.flatten(0, 1).to(dtype)
        grad_qkv_3MLd = torch.empty(qkv_3MLd.shape, dtype=dtype, device=qkv_3MLd.device)
        grad_q_MLd, grad_k_MLd, grad_v_MLd = grad_qkv_3MLd.unbind(0)

        # Compute the gradients of v and of the weights from y = weights v, and the gradient of the scores from
        # weights = softmax(scores).
        torch.bmm(weights_MLL.mT, grad_y_MLd, out=grad_v_MLd)
        # The gradient of the weights is not stored in a variable, so that its memory is freed after this line.
        grad_scores_MLL = torch.ops.aten._softmax_backward_data(torch.bmm(grad_y_MLd, v_MLd.mT), weights_MLL, -1, dtype)
        # Compute the gradients of q and k from scores = scale q k^T + bias. `baddbmm` also multiplies by the scale, so
        # the result need not be read again; with beta=0 it ignores its first argument.
        scale = q_MLd.shape[-1] ** -0.5
        torch.baddbmm(grad_q_MLd, grad_scores_MLL, k_MLd, beta=0, alpha=scale, out=grad_q_MLd)
        torch.baddbmm(grad_k_MLd, grad_scores_MLL.mT, q_MLd, beta=0, alpha=scale, out=grad_k_MLd)

        grad_qkv_3NhLd = grad_qkv_3MLd.view(ctx.qkv_shape).to(qkv_3MLd.dtype)
        return grad_qkv_3NhLd, grad_scores_MLL.sum(0).to(ctx.bias_dtype)


def softmax_(scores_MLL: Tensor) -> Tensor:
    """Return the softmax over the last dimension of (N * h, L, L) scores; the function may overwrite the scores.

    For rows shorter than a vector register, the softmax of torch takes five times as long (CPU, torch 2.13).
    """
    if scores_MLL.shape[-1] >= VECTOR_LENGTH:
        return scores_MLL.softmax(-1)
    # The largest score is subtracted so that no exponential overflows.
    weights_MLL = scores_MLL.sub_(scores_MLL.amax(-1, keepdim=True)).exp_()
    return weights_MLL.div_(weights_MLL.sum(-1, keepdim=True))


def _choose_compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of `x`, or float32 if this dtype is less precise than float32."""
    return torch.promote_types(x.dtype, torch.float32)
