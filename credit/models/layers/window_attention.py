"""Window attention with a dynamic position bias, on tokens (B, H, W, C) (CrossFormer, arXiv 2108.00154).

Shape suffixes: B batch, H and W rows and columns of the grid, C channels, N windows of the whole batch, L positions in
a window, h heads, d channels per head.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.kernels.attention import attention, attention_with_changed_weights
from credit.models.kernels.autocast import without_autocast
from credit.models.kernels.recompute_linear import CustomProductLinear, RecomputedNorm, norm_linear
from credit.models.layers.norm import NO_CONDITION_DIMS, NO_CONDITIONS, ConditionDims, Conditions, LayerNorm
from credit.models.layers.seeded_dropout import SeededDropout

BiasIndex = Literal["published", "exact"]


def to_windows(x_BHWC: Tensor, window: int, *, strided: bool) -> Tensor:
    """Rearrange the tokens of a grid into square windows.

    Args:
        x_BHWC: tokens of the grid.
        window: edge of a window in cells; a divisor of H and W.
        strided: False for windows of neighbouring cells (short attention). True for windows of distant cells, with a
            distance of H / window rows and W / window columns between neighbours (long attention).

    Returns:
        The N windows of the complete batch with L = window^2 positions each, (N, L, C), in row-major order.

    Raises:
        ValueError: if the window does not divide the grid.
    """
    B, H, W, C = x_BHWC.shape
    if H % window or W % window:
        raise ValueError(f"a window of {window} x {window} cells does not divide a grid of {H} x {W} cells")
    # Split the row index and the column index into two indices each: (position in the window, window) if the windows
    # are strided, otherwise (window, position in the window). Then move the windows before the positions.
    if strided:
        cells = x_BHWC.view(B, window, H // window, window, W // window, C).permute(0, 2, 4, 1, 3, 5)
    else:
        cells = x_BHWC.view(B, H // window, window, W // window, window, C).permute(0, 1, 3, 2, 4, 5)
    return cells.reshape(-1, window * window, C)


def from_windows(x_NLC: Tensor, window: int, grid: tuple[int, int], *, strided: bool) -> Tensor:
    """Rearrange windows into the tokens of a grid, (B, H, W, C); the inverse of `to_windows`.

    Args:
        x_NLC: tokens of the windows.
        window: edge of a window in cells.
        grid: numbers of rows and columns (H, W) of the grid.
        strided: as in `to_windows`.
    """
    H, W = grid
    # (B, window row, window column, row in the window, column in the window, C)
    cells = x_NLC.view(-1, H // window, W // window, window, window, x_NLC.shape[-1])
    if strided:
        cells = cells.permute(0, 3, 1, 4, 2, 5)
    else:
        cells = cells.permute(0, 1, 3, 2, 4, 5)
    return cells.reshape(-1, H, W, x_NLC.shape[-1])


class DynamicPositionBias(nn.Module):
    """Position bias of attention: an MLP computes it from the row and column offset of two positions.

    All heads share the bias. Under autocast the MLP stays in float32, because casting its weights would take longer
    than its matrix products.

    Args:
        dim: width of the hidden layers.
        window: edge of a window in cells.
        index: rule for the lookup of the bias in the table of the MLP outputs. `exact` uses the output for the offset
            of query and key. `published` assumes a wrong row length of the table, like the code that trained the
            published WXFormer weights.
    """

    def __init__(self, dim: int, window: int, index: BiasIndex = "exact") -> None:
        super().__init__()
        self.window = window
        self.index = index
        # The input of the first layer is an offset (two components); the output of the last layer is the bias.
        hidden_layers: list[nn.Module] = []
        for in_features in (2, dim, dim):
            hidden_layers += [nn.Linear(in_features, dim), nn.LayerNorm(dim), nn.ReLU()]
        self.layers = nn.Sequential(*hidden_layers, nn.Linear(dim, 1))
        self.register_buffer("cached_bias", None, persistent=False)

    def forward(self) -> Tensor:
        """Return the bias (L, L) of query position i and key position j, where L = window^2."""
        return self._compute_bias() if self.cached_bias is None else self.cached_bias

    @torch.no_grad()
    def precompute(self) -> None:
        """Compute and cache the bias for inference. After this call, the weights must not change."""
        self.cached_bias = self._compute_bias()

    def _compute_bias(self) -> Tensor:
        """Compute the bias (L, L) with the MLP, from all offsets of two positions in a window."""
        w = self.window
        # Offsets inside a window are between -(w - 1) and w - 1. The table also contains the offsets -w and w, because
        # the published weights were trained with this table.
        reference = self.layers[0].bias
        offsets = torch.arange(-w, w + 1, device=reference.device, dtype=reference.dtype)
        with without_autocast(reference):
            values = self.layers(torch.cartesian_prod(offsets, offsets)).squeeze(-1)
        if self.index == "published":
            # A row of the table has 2w + 1 values, but the lookup of the published training code assumes 2w - 1.
            table = values[: (2 * w - 1) ** 2].view(2 * w - 1, 2 * w - 1)
        else:
            table = values.view(2 * w + 1, 2 * w + 1)[1:-1, 1:-1]
        # table[a, b] is the bias for the offset i - j = (a - w + 1, b - w + 1) of query i and key j. Along rows,
        # unfolding gives a = (row of i) + k with k = w - 1 - (row of j), so the axis of k is flipped. The same applies
        # along columns.
        return table.unfold(0, w, 1).unfold(1, w, 1).flip(2, 3).reshape(w * w, w * w)


class WindowAttention(nn.Module):
    """Pre-norm multi-head attention inside square windows, without the residual connection.

    The outputs of `to_qkv` are ordered (head; q, k, v; channel of the head). Tensor parallelism splits the outputs into
    consecutive parts, so each rank gets complete heads.

    Args:
        dim: channels of the tokens.
        dim_head: channels per head; divides `dim`.
        window: edge of a window in cells; a divisor of height and width of the grid.
        strided: True for windows of distant cells, False for windows of neighbouring cells, see `to_windows`.
        dropout: probability of dropping an attention weight in training.
        bias_index: rule for the lookup of the position bias, see `DynamicPositionBias`.
        condition_dims: lengths of the conditions that the norm depends on.
    """

    # True to recompute the result of the norm in the backward pass if this saves enough memory. Activation
    # checkpointing of a block sets the attribute to False, because checkpointing already frees the activations of the
    # block.
    saves_memory = True

    def __init__(
        self,
        dim: int,
        dim_head: int,
        window: int,
        *,
        strided: bool = False,
        dropout: float = 0.0,
        bias_index: BiasIndex = "exact",
        condition_dims: ConditionDims = NO_CONDITION_DIMS,
    ) -> None:
        super().__init__()
        self.heads = dim // dim_head
        self.dim_head = dim_head
        self.window = window
        self.strided = strided
        self.dropout = dropout
        # Layer of `dropout` noise, set by `use_seeded_dropout`.
        self.seeded_dropout: SeededDropout | None = None
        self.norm = LayerNorm(dim, condition_dims)
        self.to_qkv = CustomProductLinear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.position_bias = DynamicPositionBias(dim // 4, window, bias_index)

    def forward(self, x_BHWC: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the attention output (B, H, W, C), to be added to the tokens.

        Args:
            x_BHWC: tokens.
            conditions: vectors of each sample or cell, such as noise, on which the norm and dropout depend.

        Raises:
            ValueError: if the window does not divide height and width.
        """
        arrange = partial(to_windows, window=self.window, strided=self.strided)
        product = F.linear
        # The kernel can recompute only norms that do not depend on a condition.
        if self.saves_memory and not conditions.changes_norms:
            norm = RecomputedNorm.build_if_worthwhile(self.norm, x_BHWC)
            if norm is not None:
                product = partial(norm_linear, norm=norm, arrange=arrange)
        qkv_NLC = self.to_qkv(arrange(self.norm(x_BHWC, conditions)), product)
        # The number of heads is -1 because a tensor-parallel rank holds only some of the heads.
        qkv_NLh3d = qkv_NLC.unflatten(-1, (-1, 3, self.dim_head))
        qkv_3NhLd = qkv_NLh3d.permute(3, 0, 2, 1, 4)
        # The three cases are seeded dropout, windows of one cell, and all other windows (with the dropout of torch).
        bias_LL = self.position_bias()
        dropout = self.dropout if self.training else 0.0
        if self.seeded_dropout is not None and conditions.dropout_seeds_BM is not None:
            drop = partial(
                self.seeded_dropout.drop_attention_weights, seeds_BM=conditions.dropout_seeds_BM, heads=self.heads
            )
            y_NhLd = attention_with_changed_weights(qkv_3NhLd, bias_LL, drop)
        elif self.window == 1 and dropout == 0.0:
            # The result for a cell that attends only to itself is the value of the cell. The bias is added with factor
            # 0, so that the MLP of the bias has a gradient (of zeros).
            y_NhLd = torch.add(qkv_3NhLd[2], bias_LL.to(qkv_NLC.dtype), alpha=0)
        else:
            y_NhLd = attention(qkv_3NhLd, bias_LL, dropout)
        y_NLC = self.to_out(y_NhLd.transpose(1, 2).flatten(2))
        return from_windows(y_NLC, self.window, x_BHWC.shape[1:3], strided=self.strided)
