"""Attention in shifted windows with cosine similarity and a continuous position bias (Swin V2, arXiv 2111.09883).

Shape suffixes: B batch, H and W rows and columns of tokens, C channels, N windows of the whole batch, n windows of one
sample, L positions in a window, h heads, d channels per head.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.kernels.autocast import without_autocast
from credit.models.layers.norm import NO_CONDITIONS, Conditions
from credit.models.layers.seeded_dropout import SeededDropout
from credit.models.layers.window_attention import from_windows, to_windows
from credit.parallel.domain.division import FieldPart

# Hidden channels of the MLP of the position bias, and the largest bias (arXiv 2111.09883, section 3.3).
BIAS_HIDDEN_CHANNELS = 512
LARGEST_BIAS = 16.0
# The offsets are scaled to -8 ... 8 before the logarithm.
OFFSET_SCALE = 8.0
# Initial and largest factor of the cosine: 1 / 0.1 and 1 / 0.01, where 0.01 is the smallest temperature in the paper.
INITIAL_LOGIT_SCALE = 10.0
LARGEST_LOGIT_SCALE = 100.0


class ContinuousPositionBias(nn.Module):
    """Position bias of attention: for each head, an MLP computes it from the log-spaced offset of two positions.

    Under autocast the MLP stays in float32, because casting its weights would take longer than its matrix products.

    Args:
        heads: number of heads.
        window: edge of a window in tokens.
    """

    def __init__(self, heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.expand = nn.Linear(2, BIAS_HIDDEN_CHANNELS)
        self.contract = nn.Linear(BIAS_HIDDEN_CHANNELS, heads, bias=False)
        # Cached bias for inference, set by `precompute`; None while the weights may still change.
        self.register_buffer("cached_bias", None, persistent=False)

    def forward(self) -> Tensor:
        """Return the bias (h, L, L) of query position i and key position j, where L = window^2."""
        return self._compute_bias() if self.cached_bias is None else self.cached_bias

    @torch.no_grad()
    def precompute(self) -> None:
        """Compute and cache the bias for inference. After this call, the weights must not change."""
        self.cached_bias = self._compute_bias()

    def _compute_bias(self) -> Tensor:
        """Compute the bias (h, L, L) with the MLP, from all offsets of two positions in a window."""
        w = self.window
        reference = self.expand.bias
        # The maximum avoids a division by zero for a window of one token, which has only the offset 0.
        offsets = torch.arange(1 - w, w, device=reference.device, dtype=reference.dtype)
        offsets = offsets * (OFFSET_SCALE / max(w - 1, 1))
        log_offsets = offsets.sign() * torch.log2(offsets.abs() + 1) / math.log2(OFFSET_SCALE)
        # The sigmoid limits the bias to 0 ... LARGEST_BIAS.
        with without_autocast(reference):
            hidden = F.relu(self.expand(torch.cartesian_prod(log_offsets, log_offsets)))
            values = LARGEST_BIAS * torch.sigmoid(self.contract(hidden))
        # table[head, a, b] is the bias for the offset i - j = (a - w + 1, b - w + 1) of query i and key j. Along rows,
        # unfolding gives a = (row of i) + k with k = w - 1 - (row of j), so the axis of k is flipped. The same applies
        # along columns.
        table = values.view(2 * w - 1, 2 * w - 1, -1).permute(2, 0, 1)
        return table.unfold(1, w, 1).unfold(2, w, 1).flip(3, 4).reshape(-1, w * w, w * w)


class LogitScale(nn.Module):
    """Learned factor of the cosine of query and key, for each head.

    Args:
        heads: number of heads.
    """

    # Weight decay would pull the factor towards 1.
    has_weight_decay = False

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.empty(heads))

    def forward(self) -> Tensor:
        """Return the factors (h,)."""
        return self.logarithm.clamp(max=math.log(LARGEST_LOGIT_SCALE)).exp()

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return a tensor of `shape` filled with the logarithm of the initial factor, on the CPU."""
        return torch.full(shape, math.log(INITIAL_LOGIT_SCALE), device="cpu")


class ShiftedWindowAttention(nn.Module):
    """Multi-head cosine attention inside square windows, without norm and residual connection.

    The layer rolls the grid of tokens by the shift and then divides it into windows, so a window at the end of an axis
    also contains tokens from the beginning of the axis. If the two ends are not neighbours on the globe, attention
    between tokens from different ends is masked.

    The outputs of `to_qkv` are ordered (head; q, k, v; channel of the head). Tensor parallelism splits the outputs into
    consecutive parts, so each rank gets complete heads.

    Args:
        dim: channels of the tokens.
        heads: number of heads; divides `dim`.
        window: edge of a window in tokens; divides the rows and columns of `grid`.
        grid: number of rows and columns of the tokens.
        is_shifted: True to shift the windows by half a window along each axis that is longer than a window.
        wraps_columns: True if the columns are periodic, so that only the rows are masked.
        dropout: probability of dropping an attention weight in training.
        mask_value: number that is added to the scores of masked pairs.

    Attributes:
        shift: number of rows and columns by which the windows are shifted.
        rolls_input: True if the layer rolls its input; False if its input is already rolled, as with domain
            parallelism.
        parts: for each rank of the domain group, the part of the rolled grid that the rank computes; the complete grid
            without domain parallelism.
        field_ranks: ranks of the domain group whose tokens the layer receives between its projections: this rank; with
            sequence parallelism also its tensor-parallel peers.
        first_unit: index of the first head of this rank; 0 without tensor parallelism.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int,
        grid: tuple[int, int],
        *,
        is_shifted: bool = False,
        wraps_columns: bool = True,
        dropout: float = 0.0,
        mask_value: float = -math.inf,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dim_head = dim // heads
        self.window = window
        self.grid = grid
        self.wraps_columns = wraps_columns
        self.dropout = dropout
        self.mask_value = mask_value
        # Layer of `dropout` noise, set by `use_seeded_dropout`.
        self.seeded_dropout: SeededDropout | None = None
        # An axis with a single window is not shifted, because each token already attends to all tokens of the axis.
        shifts = [0, 0]
        for axis, size in enumerate(grid):
            if is_shifted and size > window:
                shifts[axis] = window // 2
        row_shift, column_shift = shifts
        self.shift = (row_shift, column_shift)
        self.rolls_input = row_shift > 0 or column_shift > 0
        self.parts: tuple[FieldPart, ...] = (FieldPart(range(grid[0]), range(grid[1])),)
        self.field_ranks = range(1)
        self.first_unit = 0
        self.to_qkv = nn.Linear(dim, 3 * dim)
        # Spectral norm would not change the cosines. The published weights of this layer were not normalised either.
        self.to_qkv.is_normalized = False
        self.logit_scale = LogitScale(heads)
        self.position_bias = ContinuousPositionBias(heads, window)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x_BHWC: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the attention output (B, H, W, C), to be added to the tokens.

        Args:
            x_BHWC: tokens.
            conditions: conditions of each sample; only the dropout seeds are used.
        """
        rows, columns = self.shift
        # After the roll, shifted windows begin at multiples of the window.
        if self.rolls_input:
            x_BHWC = x_BHWC.roll((-rows, -columns), (1, 2))
        qkv_NLC = self.to_qkv(to_windows(x_BHWC, self.window, strided=False))
        # The number of heads is -1 because a tensor-parallel rank holds only some of the heads.
        qkv_NLh3d = qkv_NLC.unflatten(-1, (-1, 3, self.dim_head))
        q_NhLd, k_NhLd, v_NhLd = qkv_NLh3d.permute(3, 0, 2, 1, 4).unbind(0)
        num_heads = q_NhLd.shape[1]
        # Every rank computes the scales and biases of all heads and then selects the heads of the rank.
        scale_h = self.logit_scale()[self.first_unit : self.first_unit + num_heads]
        # The product of two unit vectors, query and key, is their cosine.
        q_NhLd = F.normalize(q_NhLd, dim=-1) * scale_h[:, None, None].to(q_NhLd.dtype)
        k_NhLd = F.normalize(k_NhLd, dim=-1)
        bias_hLL = self.position_bias()[self.first_unit : self.first_unit + num_heads]
        y_NhLd = self._attend(q_NhLd, k_NhLd, v_NhLd, bias_hLL, conditions)
        y_NLC = self.to_out(y_NhLd.transpose(1, 2).flatten(2))
        y_BHWC = from_windows(y_NLC, self.window, x_BHWC.shape[1:3], strided=False)
        if self.rolls_input:
            y_BHWC = y_BHWC.roll((rows, columns), (1, 2))
        return y_BHWC

    def _attend(
        self, q_NhLd: Tensor, k_NhLd: Tensor, v_NhLd: Tensor, bias_hLL: Tensor, conditions: Conditions
    ) -> Tensor:
        """Return softmax(q k^T + bias + mask) v, with dropout of the softmax, (N, h, L, d).

        Args:
            q_NhLd: unit vectors, multiplied by the logit scale.
            k_NhLd: unit vectors.
            v_NhLd: values.
            bias_hLL: position bias.
            conditions: conditions of each sample; only the dropout seeds are used.
        """
        shape = v_NhLd.shape
        bias = bias_hLL.to(q_NhLd.dtype)
        is_masked_nLL = self._build_attention_mask(q_NhLd.device)
        if is_masked_nLL is not None:
            # Each window of a sample has a different bias. Fused attention supports this if windows are passed as
            # heads.
            bias = torch.where(is_masked_nLL[:, None], bias + self.mask_value, bias).flatten(0, 1)
            merged_shape = (-1, len(bias), shape[2], self.dim_head)
            q_NhLd = q_NhLd.reshape(merged_shape)
            k_NhLd = k_NhLd.reshape(merged_shape)
            v_NhLd = v_NhLd.reshape(merged_shape)
        # Seeded dropout changes the attention weights, which fused attention does not return.
        if self.seeded_dropout is not None and conditions.dropout_seeds_BM is not None:
            weights_NhLL = torch.softmax(q_NhLd @ k_NhLd.mT + bias, dim=-1).to(v_NhLd.dtype)
            drop = partial(
                self.seeded_dropout.drop_attention_weights, seeds_BM=conditions.dropout_seeds_BM, heads=self.heads
            )
            kept_NhLL = drop(weights_NhLL.reshape(*shape[:3], shape[2])).view_as(weights_NhLL)
            return (kept_NhLL @ v_NhLd).view(shape)
        dropout = self.dropout if self.training else 0.0
        y_NhLd = F.scaled_dot_product_attention(q_NhLd, k_NhLd, v_NhLd, attn_mask=bias, dropout_p=dropout, scale=1.0)
        return y_NhLd.reshape(shape)

    def _build_attention_mask(self, device: torch.device) -> Tensor | None:
        """Return the bool mask (n, L, L) of pairs of tokens without attention, or None if all pairs have attention.

        The mask is True if query and key are from different ends of an axis that is not periodic.
        """
        row_shift = self.shift[0]
        column_shift = 0 if self.wraps_columns else self.shift[1]
        if row_shift == 0 and column_shift == 0:
            return None
        regions_nL = []
        for rank in self.field_ranks:
            part = self.parts[rank]
            rows = torch.arange(part.rows.start, part.rows.stop, device=device)
            columns = torch.arange(part.columns.start, part.columns.stop, device=device)
            # The last rows and columns of the rolled grid come from the beginning of the axis.
            is_rolled_row = (rows >= self.grid[0] - row_shift).long()
            is_rolled_column = (columns >= self.grid[1] - column_shift).long()
            # The four combinations are numbered 0 to 3. Tokens of a window attend to each other if their numbers agree.
            region_HW = 2 * is_rolled_row[:, None] + is_rolled_column
            regions_nL.append(to_windows(region_HW[None, :, :, None], self.window, strided=False).squeeze(-1))
        region_nL = torch.cat(regions_nL)
        return region_nL[:, :, None] != region_nL[:, None, :]
