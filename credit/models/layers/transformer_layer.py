"""Transformer layer of CrossFormer (Wang et al. 2021, arXiv 2108.00154) on tokens (B, H, W, C).

Shape suffixes: B batch, H and W rows and columns of the grid, N cells of all samples, C channels, K hidden channels.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.kernels.mlp import mlp
from credit.models.kernels.recompute_linear import CustomProductLinear, RecomputedNorm, defer_product
from credit.models.layers.norm import NO_CONDITION_DIMS, NO_CONDITIONS, ConditionDims, Conditions, LayerNorm
from credit.models.layers.seeded_dropout import SeededDropout
from credit.models.layers.window_attention import BiasIndex, WindowAttention


class FeedForward(nn.Module):
    """MLP over the channels of each token, after a norm, without the residual connection.

    Args:
        dim: channels of the tokens.
        dropout: probability of dropping a hidden channel in training.
        condition_dims: lengths of the conditions that the norm depends on.
        hidden_dim: hidden channels; None for 4 * `dim`.
        has_norm: True to normalise the input.
    """

    # True to recompute the norm in the backward pass if this saves enough memory, see `WindowAttention`.
    saves_memory = True

    def __init__(
        self,
        dim: int,
        dropout: float = 0.0,
        condition_dims: ConditionDims = NO_CONDITION_DIMS,
        hidden_dim: int | None = None,
        has_norm: bool = True,
    ) -> None:
        super().__init__()
        hidden_dim = hidden_dim or 4 * dim
        self.norm = LayerNorm(dim, condition_dims) if has_norm else None
        self.expand = CustomProductLinear(dim, hidden_dim)
        self.contract = CustomProductLinear(hidden_dim, dim)
        self.dropout = nn.Dropout(dropout)
        # Layer of `dropout` noise, set by `use_seeded_dropout`.
        self.seeded_dropout: SeededDropout | None = None

    def forward(self, x_BHWC: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the output of the MLP (B, H, W, C), to be added to the tokens.

        Args:
            x_BHWC: tokens.
            conditions: vectors of each sample or cell, such as noise, on which the norms and dropout depend.
        """
        # The MLP processes each cell separately, so all cells become rows of a single matrix.
        normed_BHWC = x_BHWC if self.norm is None else self.norm(x_BHWC, conditions)
        normed_NC = normed_BHWC.flatten(0, 2)
        # The kernel `mlp` has no dropout, so with seeded dropout or torch dropout the layers are computed separately.
        if self.seeded_dropout is not None and conditions.dropout_seeds_BM is not None:
            hidden_NK = F.gelu(self.expand(normed_NC))
            y_NC = self.contract(self.seeded_dropout.drop_channels(hidden_NK, conditions.dropout_seeds_BM))
        elif self.dropout.training and self.dropout.p:
            y_NC = self.contract(self.dropout(F.gelu(self.expand(normed_NC))))
        else:
            norm = None
            # The kernel can recompute only norms that do not depend on a condition.
            if self.norm is not None and self.saves_memory and not conditions.changes_norms:
                norm = RecomputedNorm.build_if_worthwhile(self.norm, x_BHWC)
            # The first layer defers its product to the second layer, where one kernel computes both.
            deferred = self.expand(normed_NC, defer_product)
            y_NC = self.contract(deferred, partial(mlp, norm=norm))
        return y_NC.view(x_BHWC.shape)


class TransformerLayer(nn.Module):
    """Transformer layer with four residual parts: short attention, feed-forward, long attention, feed-forward.

    The output of each part is added to its input. The layer is one unit of sharding and checkpointing. `_tp_plan`
    declares how its linear layers may be split over tensor-parallel ranks.

    Args:
        dim: channels of the tokens.
        dim_head: channels per attention head; divides `dim`.
        local_window: window edge of the short attention, in cells. These windows consist of neighbouring cells.
        global_window: window edge of the long attention, in cells. These windows consist of cells that are spread over
            the complete grid.
        attn_dropout: probability of dropping an attention weight in training.
        ff_dropout: probability of dropping a hidden channel of the feed-forward layers in training.
        bias_index: lookup of the position bias, see `DynamicPositionBias`.
        condition_dims: lengths of the conditions that the norms depend on.
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
        condition_dims: ConditionDims = NO_CONDITION_DIMS,
    ) -> None:
        super().__init__()
        self.short_attention = WindowAttention(
            dim,
            dim_head,
            local_window,
            strided=False,
            dropout=attn_dropout,
            bias_index=bias_index,
            condition_dims=condition_dims,
        )
        self.short_feed_forward = FeedForward(dim, ff_dropout, condition_dims)
        self.long_attention = WindowAttention(
            dim,
            dim_head,
            global_window,
            strided=True,
            dropout=attn_dropout,
            bias_index=bias_index,
            condition_dims=condition_dims,
        )
        self.long_feed_forward = FeedForward(dim, ff_dropout, condition_dims)

    def forward(self, x_BHWC: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the tokens (B, H, W, C) after both attentions; `local_window` and `global_window` must divide H and W.

        Args:
            x_BHWC: tokens.
            conditions: vectors of each sample or cell, such as noise, on which the norms and dropout depend.
        """
        x_BHWC = x_BHWC + self.short_attention(x_BHWC, conditions)
        x_BHWC = x_BHWC + self.short_feed_forward(x_BHWC, conditions)
        x_BHWC = x_BHWC + self.long_attention(x_BHWC, conditions)
        return x_BHWC + self.long_feed_forward(x_BHWC, conditions)
