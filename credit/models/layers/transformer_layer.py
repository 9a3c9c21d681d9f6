"""The transformer layer of CrossFormer, on channels-last tokens (arXiv 2108.00154).

Shape suffixes: B batch, H and W rows and columns of the grid, C channels.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.kernels.mlp import mlp
from credit.models.kernels.recompute_linear import RecomputedNorm, RecomputeLinear, defer
from credit.models.layers.norm import LayerNorm
from credit.models.layers.window_attention import BiasIndex, WindowAttention


class FeedForward(nn.Module):
    """Pre-norm MLP over channels, four times as wide inside, without the residual connection.

    Args:
        dim: channels of the tokens.
        dropout: probability of dropping a hidden channel in training.
        condition_dim: length of the condition that the norm depends on; 0 for none.
    """

    # As in `WindowAttention`.
    saves_memory = True

    def __init__(self, dim: int, dropout: float = 0.0, condition_dim: int = 0) -> None:
        super().__init__()
        self.norm = LayerNorm(dim, condition_dim)
        self.expand = RecomputeLinear(dim, 4 * dim)
        self.contract = RecomputeLinear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BHWC: Tensor, condition_BK: Tensor | None = None) -> Tensor:
        """Return the update of the tokens (..., C), to be added to the input.

        Args:
            x_BHWC: tokens.
            condition_BK: condition of each sample, None for none.
        """
        normed_BHWC = self.norm(x_BHWC, condition_BK)
        if self.dropout.training and self.dropout.p:
            return self.contract(self.dropout(F.gelu(self.expand(normed_BHWC))))
        norm = None
        # The kernel computes a norm again that does not depend on a condition.
        if self.saves_memory and condition_BK is None:
            norm = RecomputedNorm.if_worthwhile(self.norm, x_BHWC)
        return self.contract(self.expand(normed_BHWC, defer), partial(mlp, norm=norm))


class TransformerLayer(nn.Module):
    """Short attention, feed-forward, long attention, feed-forward, each added to its input.

    A layer is one unit of sharding and checkpointing. `_tp_plan` declares how its linear layers may be split over
    tensor-parallel ranks.

    Args:
        dim: channels of the tokens.
        dim_head: channels per attention head; divides `dim`.
        local_window: window edge of the short attention, among neighbouring cells.
        global_window: window edge of the long attention, among cells spread over the whole grid.
        attn_dropout: probability of dropping an attention weight in training.
        ff_dropout: probability of dropping a hidden channel of the feed-forward layers in training.
        bias_index: lookup of the position bias, see `DynamicPositionBias`.
        condition_dim: length of the condition that the norms depend on; 0 for none.
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
        attn_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        bias_index: BiasIndex = "exact",
        condition_dim: int = 0,
    ) -> None:
        super().__init__()
        self.short_attention = WindowAttention(
            dim,
            dim_head,
            local_window,
            strided=False,
            dropout=attn_dropout,
            bias_index=bias_index,
            condition_dim=condition_dim,
        )
        self.short_feed_forward = FeedForward(dim, ff_dropout, condition_dim)
        self.long_attention = WindowAttention(
            dim,
            dim_head,
            global_window,
            strided=True,
            dropout=attn_dropout,
            bias_index=bias_index,
            condition_dim=condition_dim,
        )
        self.long_feed_forward = FeedForward(dim, ff_dropout, condition_dim)

    def forward(self, x_BHWC: Tensor, condition_BK: Tensor | None = None) -> Tensor:
        """Return tokens of the same shape (B, H, W, C); both windows must divide H and W.

        Args:
            x_BHWC: tokens.
            condition_BK: condition of each sample, None for none.
        """
        x_BHWC = x_BHWC + self.short_attention(x_BHWC, condition_BK)
        x_BHWC = x_BHWC + self.short_feed_forward(x_BHWC, condition_BK)
        x_BHWC = x_BHWC + self.long_attention(x_BHWC, condition_BK)
        return x_BHWC + self.long_feed_forward(x_BHWC, condition_BK)
