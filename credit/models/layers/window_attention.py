"""The transformer layer of WXFormer on channels-last tokens.

Shape suffixes: B batch, H and W rows and columns of the stage's grid, C channels, N windows of the whole batch, L
positions in a window, h heads, d channels per head.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.models.kernels.autocast import without_autocast
from credit.models.kernels.dispatch import use_cpu_kernels
from credit.models.kernels.recompute_linear import (
    RecomputedNorm,
    RecomputeLinear,
    norm_linear,
    operands,
    outside_autocast,
    perceptron,
)

BiasIndex = Literal["published", "exact"]
# float32 numbers of the longest vector register
SHORT_ROW = 16


def to_windows(x_BHWC: Tensor, window: int, *, strided: bool) -> Tensor:
    """Return tokens (N, L, C) of square windows: contiguous cells, or cells at distance H/window and W/window."""
    B, H, W, C = x_BHWC.shape
    if strided:
        cells = x_BHWC.view(B, window, H // window, window, W // window, C).permute(0, 2, 4, 1, 3, 5)
    else:
        cells = x_BHWC.view(B, H // window, window, W // window, window, C).permute(0, 1, 3, 2, 4, 5)
    return cells.reshape(-1, window * window, C)


def from_windows(x_NLC: Tensor, window: int, grid: tuple[int, int], *, strided: bool) -> Tensor:
    """Undo `to_windows` for a grid of (H, W); a view with six dimensions: B, H in two parts, W in two parts, C."""
    H, W = grid
    cells = x_NLC.view(-1, H // window, W // window, window, window, x_NLC.shape[-1])
    return cells.permute(0, 3, 1, 4, 2, 5) if strided else cells.permute(0, 1, 3, 2, 4, 5)


class DynamicPositionBias(nn.Module):
    """MLP from a row and column offset to an additive attention bias, shared by all heads.

    Under autocast it stays as it is: it is so small that casting its weights takes longer than its products.

    Args:
        dim: hidden width.
        window: window edge in cells.
        index: `published` looks values up as the published weights were trained, `exact` by the true offset.
    """

    def __init__(self, dim: int, window: int, index: BiasIndex) -> None:
        super().__init__()
        self.window = window
        self.index = index
        hidden: list[nn.Module] = []
        for width in (2, dim, dim):
            hidden += [nn.Linear(width, dim), nn.LayerNorm(dim), nn.ReLU()]
        self.layers = nn.Sequential(*hidden, nn.Linear(dim, 1))

    def forward(self) -> Tensor:
        """Return the bias (L, L) of query i and key j."""
        return self.made_bias if hasattr(self, "made_bias") else self._bias()

    def make_once(self) -> None:
        """Compute the bias once, for weights that do not change any more."""
        with torch.no_grad():
            bias_LL = self._bias()
        self.register_buffer("made_bias", bias_LL, persistent=False)

    def _bias(self) -> Tensor:
        w = self.window
        bias = self.layers[0].bias
        offsets = torch.arange(-w, w + 1, device=bias.device, dtype=bias.dtype)
        with without_autocast(bias):
            values = self.layers(torch.cartesian_prod(offsets, offsets)).squeeze(-1)
        if self.index == "published":
            # The grid's rows are 2w+1 values long, the lookup counts rows of 2w-1: published weights were trained so.
            table = values[: (2 * w - 1) ** 2].view(2 * w - 1, 2 * w - 1)
        else:
            table = values.view(2 * w + 1, 2 * w + 1)[1:-1, 1:-1]
        # table[a, b] belongs to offsets i-j of (a-w+1, b-w+1); unfolding gives a = row_i + k, and k runs against row_j.
        return table.unfold(0, w, 1).unfold(1, w, 1).flip(2, 3).reshape(w * w, w * w)


def attend_fused(qkv_3NhLd: Tensor, bias_LL: Tensor, dropout: float) -> Tensor:
    """Return softmax(q k^T / sqrt(d) + bias) v, (N, h, L, d), by the kernel that the device has for it."""
    return F.scaled_dot_product_attention(
        *qkv_3NhLd.unbind(0), attn_mask=bias_LL.to(qkv_3NhLd.dtype), dropout_p=dropout
    )


def attend_on_cpu(qkv_3NhLd: Tensor, bias_LL: Tensor) -> Tensor:
    """Return the same as `attend_fused` without dropout, computed in float32 as that does, as products of matrices.

    No kernel of the CPU gives the bias a gradient (torch 2.13): what runs instead scales q and k into copies, which it
    keeps, and looks for rows without any weight.
    """
    return _AttendOnCpu.apply(qkv_3NhLd, bias_LL)


class _AttendOnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, qkv_3NhLd: Tensor, bias_LL: Tensor) -> Tensor:
        _, N, h, L, d = qkv_3NhLd.shape
        with torch.autocast("cpu", enabled=False):
            qkv_3BLd = qkv_3NhLd.reshape(3, N * h, L, d)  # a view for one head
            q, k, v = qkv_3BLd.to(_wide(qkv_3BLd)).unbind(0)
            weights_BLL = softmax_(torch.baddbmm(bias_LL.to(q.dtype), q, k.mT, alpha=d**-0.5))
            y_BLd = torch.bmm(weights_BLL, v)
        ctx.save_for_backward(qkv_3BLd, weights_BLL)
        ctx.shape, ctx.bias_dtype = qkv_3NhLd.shape, bias_LL.dtype
        return y_BLd.view(N, h, L, d).to(qkv_3NhLd.dtype)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: FunctionCtx, gradient_NhLd: Tensor) -> tuple[Tensor, Tensor]:
        qkv_3BLd, weights_BLL = ctx.saved_tensors
        q, k, v = qkv_3BLd.to(_wide(qkv_3BLd)).unbind(0)
        gradient_BLd = gradient_NhLd.flatten(0, 1).to(q.dtype)
        of_qkv_3BLd = torch.empty(qkv_3BLd.shape, dtype=q.dtype, device=q.device)
        of_q, of_k, of_v = of_qkv_3BLd.unbind(0)
        torch.bmm(weights_BLL.mT, gradient_BLd, out=of_v)
        of_scores_BLL = torch.ops.aten._softmax_backward_data(
            torch.bmm(gradient_BLd, v.mT), weights_BLL, -1, weights_BLL.dtype
        )
        scale = q.shape[-1] ** -0.5
        torch.baddbmm(of_q, of_scores_BLL, k, beta=0, alpha=scale, out=of_q)
        torch.baddbmm(of_k, of_scores_BLL.mT, q, beta=0, alpha=scale, out=of_k)
        return of_qkv_3BLd.view(ctx.shape).to(qkv_3BLd.dtype), of_scores_BLL.sum(0).to(ctx.bias_dtype)


def softmax_(scores_BLL: Tensor) -> Tensor:
    """Return the softmax of each row; the argument's memory may hold it.

    Of rows that do not fill a vector torch's own takes five times as long on a CPU (torch 2.13).
    """
    if scores_BLL.shape[-1] >= SHORT_ROW:
        return scores_BLL.softmax(-1)
    weights_BLL = scores_BLL.sub_(scores_BLL.amax(-1, keepdim=True)).exp_()
    return weights_BLL.div_(weights_BLL.sum(-1, keepdim=True))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class Attention(nn.Module):
    """Pre-norm multi-head attention inside windows, without the residual.

    The rows of `to_qkv` are ordered (head, [q, k, v], d), so that a plain column split gives whole heads.
    """

    saves_memory = True

    def __init__(
        self, dim: int, dim_head: int, window: int, *, strided: bool, dropout: float, bias_index: BiasIndex
    ) -> None:
        super().__init__()
        self.heads = dim // dim_head
        self.dim_head = dim_head
        self.window = window
        self.strided = strided
        self.dropout = dropout
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = RecomputeLinear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.position_bias = DynamicPositionBias(dim // 4, window, bias_index)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Return the attention's output (B, H, W, C), a residual to be added to the input."""
        arrange = partial(to_windows, window=self.window, strided=self.strided)
        again = RecomputedNorm.where_it_pays(self.norm, x_BHWC) if self.saves_memory else None
        product = F.linear if again is None else partial(norm_linear, again=again, arrange=arrange)
        qkv_NLC = self.to_qkv(arrange(self.norm(x_BHWC)), product)
        # -1: a rank under tensor parallelism holds a part of the heads.
        qkv_NLh3d = qkv_NLC.unflatten(-1, (-1, 3, self.dim_head))
        qkv_3NhLd, bias_LL = qkv_NLh3d.permute(3, 0, 2, 1, 4), self.position_bias()
        dropout = self.dropout if self.training else 0.0
        if self.window == 1 and not dropout:
            # A cell that sees itself alone. The bias takes part so that it has a gradient, of zeros.
            y_NhLd = torch.add(qkv_3NhLd[2], bias_LL.to(qkv_NLC.dtype), alpha=0)
        elif use_cpu_kernels(qkv_NLC) and not dropout and not torch.compiler.is_compiling():
            y_NhLd = attend_on_cpu(qkv_3NhLd, bias_LL)
        else:
            y_NhLd = attend_fused(qkv_3NhLd, bias_LL, dropout)
        y_NLC = self.to_out(y_NhLd.transpose(1, 2).flatten(2))
        return from_windows(y_NLC, self.window, x_BHWC.shape[1:3], strided=self.strided).reshape(x_BHWC.shape)


class FeedForward(nn.Module):
    """Pre-norm two-layer perceptron over channels, four times as wide inside, without the residual."""

    saves_memory = True

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.expand = RecomputeLinear(dim, 4 * dim)
        self.contract = RecomputeLinear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Return the residual (B, H, W, C) to be added to the input."""
        normed_BHWC = self.norm(x_BHWC)
        if self.dropout.training and self.dropout.p:
            return self.contract(self.dropout(F.gelu(self.expand(normed_BHWC))))
        again = RecomputedNorm.where_it_pays(self.norm, x_BHWC) if self.saves_memory else None
        return self.contract(self.expand(normed_BHWC, operands), partial(perceptron, again=again))


class TransformerLayer(nn.Module):
    """Short attention, feed-forward, long attention, feed-forward, each added to its input.

    One sharding and checkpointing unit. `_tp_plan` says how its linear layers may be split over tensor-parallel ranks.
    """

    _fsdp2_shard = True
    _tp_plan = {
        "short_attention.to_qkv": "colwise",
        "short_attention.to_out": "rowwise",
        "short_attention.position_bias": "replicated",
        "short_feed_forward.expand": "colwise",
        "short_feed_forward.contract": "rowwise",
        "long_attention.to_qkv": "colwise",
        "long_attention.to_out": "rowwise",
        "long_attention.position_bias": "replicated",
        "long_feed_forward.expand": "colwise",
        "long_feed_forward.contract": "rowwise",
    }

    def __init__(
        self,
        dim: int,
        dim_head: int,
        *,
        local_window: int,
        global_window: int,
        attn_dropout: float,
        ff_dropout: float,
        bias_index: BiasIndex,
    ) -> None:
        super().__init__()
        self.short_attention = Attention(
            dim, dim_head, local_window, strided=False, dropout=attn_dropout, bias_index=bias_index
        )
        self.short_feed_forward = FeedForward(dim, ff_dropout)
        self.long_attention = Attention(
            dim, dim_head, global_window, strided=True, dropout=attn_dropout, bias_index=bias_index
        )
        self.long_feed_forward = FeedForward(dim, ff_dropout)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Return tokens of the same shape (B, H, W, C)."""
        x_BHWC = x_BHWC + self.short_attention(x_BHWC)
        x_BHWC = x_BHWC + self.short_feed_forward(x_BHWC)
        x_BHWC = x_BHWC + self.long_attention(x_BHWC)
        return x_BHWC + self.long_feed_forward(x_BHWC)
