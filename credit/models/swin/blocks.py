"""Blocks of the Swin transformer: patch embedding, transformer block, down- and up-sampling by convolutions, and head.

Shape suffixes: B batch, C channels, H and W rows and columns, N tokens of all samples, K hidden channels; P edge of a
patch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit.models.layers.norm import NO_CONDITION_DIMS, NO_CONDITIONS, ConditionDims, Conditions, LayerNorm
from credit.models.layers.padding import NO_PADDING, SpherePadding
from credit.models.layers.transformer_layer import FeedForward
from credit.models.layers.up_sampling import Refinement
from credit.models.swin.attention import ShiftedWindowAttention

# Factor on the initial weights of the head. An untrained network then predicts small changes, and its first loss is
# close to the loss of persistence.
HEAD_SCALE = 0.1


class CubeEmbedding(nn.Module):
    """Patch embedding: each patch of P x P cells, with all channels and frames, becomes one token.

    Args:
        in_channels: number of input channels times number of frames.
        dim: channels of a token.
        patch_size: P, edge of a patch in cells.
        padding: padding of the input on the sphere.
    """

    _fsdp2_shard = True

    def __init__(self, in_channels: int, dim: int, patch_size: int, padding: SpherePadding) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.padding = padding
        self.project = nn.Linear(in_channels * patch_size**2, dim)
        # The published weights of the embedding were trained without spectral norm.
        self.project.is_normalized = False
        self.norm = nn.LayerNorm(dim)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the tokens (B, H // P, W // P, dim), where H and W are the size of the padded field.

        Args:
            x_BCHW: field without padding.
        """
        x_BCHW = self.padding.pad(x_BCHW)
        P = self.patch_size
        rows, columns = x_BCHW.shape[2] // P, x_BCHW.shape[3] // P
        # Cells that do not fill a patch are dropped. The inputs of a token are ordered (channel, row, column).
        cells_BCHPWP = x_BCHW[..., : rows * P, : columns * P].unflatten(3, (columns, P)).unflatten(2, (rows, P))
        patches_BHWC = cells_BCHPWP.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return self.norm(self.project(patches_BHWC))


class SwinBlock(nn.Module):
    """Swin-V2 block: attention and feed-forward layer, each followed by a norm and added to the tokens.

    Args:
        attention: attention layer.
        dim: channels of the tokens.
        dropout: dropout of the feed-forward layer.
        condition_dims: lengths of the conditions that the norms depend on.
    """

    _fsdp2_shard = True
    _tp_plan = {
        "attention.logit_scale": "replicated",
        "attention.position_bias": "replicated",
        "attention.to_qkv": "colwise",
        "attention.to_out": "rowwise",
        "feed_forward.expand": "colwise",
        "feed_forward.contract": "rowwise",
    }

    def __init__(
        self,
        attention: ShiftedWindowAttention,
        dim: int,
        dropout: float = 0.0,
        condition_dims: ConditionDims = NO_CONDITION_DIMS,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = LayerNorm(dim, condition_dims)
        self.feed_forward = FeedForward(dim, dropout, has_norm=False)
        self.feed_forward_norm = LayerNorm(dim, condition_dims)

    def forward(self, x_BHWC: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the tokens (B, H, W, C) after attention and the feed-forward layers.

        Args:
            x_BHWC: tokens.
            conditions: vectors of each sample or token, such as noise, on which the norms and dropout depend.
        """
        # The norm after a branch bounds what the branch adds, which keeps deep networks stable (arXiv 2111.09883).
        x_BHWC = x_BHWC + self.attention_norm(self.attention(x_BHWC, conditions), conditions)
        return x_BHWC + self.feed_forward_norm(self.feed_forward(x_BHWC, conditions), conditions)


class WrapConv(nn.Conv2d):
    """3x3 convolution that reads zeros beyond the first and last row, and beyond the columns if they do not wrap.

    Args:
        in_channels: input channels.
        out_channels: output channels.
        stride: stride in cells.
        wraps_columns: True if the columns are periodic.

    Attributes:
        wrap: padding by periodic columns on each side.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1, *, wraps_columns: bool = True) -> None:
        # `wrap` adds periodic columns before the convolution; the convolution pads all other edges with zeros.
        super().__init__(in_channels, out_channels, 3, stride=stride, padding=(1, 0 if wraps_columns else 1))
        self.wrap = SpherePadding("mirror", lon=(1, 1)) if wraps_columns else NO_PADDING

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the convolved field (B, out_channels, H / stride, W / stride); these sizes are rounded up."""
        return super().forward(self.wrap.pad(x_BCHW))


class WrapRefinement(Refinement):
    """`Refinement` with `WrapConv` as its convolutions.

    Args:
        channels: input and output channels.
        groups: groups of the norms; divides `channels`.
        condition_dims: lengths of the conditions that the norms depend on.
        wraps_columns: True if the columns are periodic.
    """

    def __init__(self, channels: int, groups: int, condition_dims: ConditionDims, *, wraps_columns: bool) -> None:
        super().__init__(channels, groups, condition_dims)
        # The base class builds convolutions that read zeros beyond all edges.
        for index, layer in enumerate(self):
            if isinstance(layer, nn.Conv2d):
                self[index] = WrapConv(channels, channels, wraps_columns=wraps_columns)


class DownBlock(nn.Module):
    """Down-sampling by a convolution of stride 2, followed by a `WrapRefinement` as a residual branch.

    Args:
        dim: channels.
        groups: groups of the norms; divides `dim`.
        condition_dims: lengths of the conditions that the norms depend on.
        wraps_columns: True if the columns are periodic.
    """

    _fsdp2_shard = True

    def __init__(self, dim: int, groups: int, condition_dims: ConditionDims, *, wraps_columns: bool) -> None:
        super().__init__()
        self.conv = WrapConv(dim, dim, stride=2, wraps_columns=wraps_columns)
        self.refine = WrapRefinement(dim, groups, condition_dims, wraps_columns=wraps_columns)

    def forward(self, x_BCHW: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the down-sampled field (B, C, H / 2, W / 2); odd sizes are rounded up.

        Args:
            x_BCHW: field.
            conditions: vectors of each sample or cell, at the resolution of the result, on which the norms depend.
        """
        x_BCHW = self.conv(x_BCHW)
        return x_BCHW + self.refine(x_BCHW, conditions)


class SwinUpBlock(nn.Module):
    """Up-sampling by a transposed convolution, followed by a `WrapRefinement` as a residual branch.

    Args:
        dim: output channels; the input has 2 * dim channels.
        groups: groups of the norms; divides `dim`.
        condition_dims: lengths of the conditions that the norms depend on.
        wraps_columns: True if the columns are periodic.
    """

    _fsdp2_shard = True

    def __init__(self, dim: int, groups: int, condition_dims: ConditionDims, *, wraps_columns: bool) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(2 * dim, dim, 2, stride=2)
        self.refine = WrapRefinement(dim, groups, condition_dims, wraps_columns=wraps_columns)

    def forward(self, x_BCHW: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the up-sampled field (B, dim, 2H, 2W).

        Args:
            x_BCHW: (B, 2 * dim, H, W) field.
            conditions: vectors of each sample or cell, at the resolution of the result, on which the norms depend.
        """
        x_BCHW = self.conv(x_BCHW)
        return x_BCHW + self.refine(x_BCHW, conditions)


class PatchHead(nn.Linear):
    """Linear layer from each token to the cells of its patch.

    Args:
        dim: channels of a token.
        out_channels: number of output channels times number of output frames.
        patch_size: P, edge of a patch in cells.
    """

    _fsdp2_shard = True

    def __init__(self, dim: int, out_channels: int, patch_size: int) -> None:
        super().__init__(dim, out_channels * patch_size**2)
        self.patch_size = patch_size

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Return the field (B, out_channels, H * P, W * P) from the tokens (B, H, W, C)."""
        P = self.patch_size
        # The outputs of a token are ordered (row, column, channel).
        y_BHWPPC = super().forward(x_BHWC).unflatten(-1, (P, P, -1))
        # Permute to (B, channel, H, row of the patch, W, column of the patch), then merge rows and merge columns.
        return y_BHWPPC.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return an initial value on the CPU: uniform in +-HEAD_SCALE / sqrt(dim) for the weight, zeros for the bias.

        Args:
            key: ``"weight"`` or ``"bias"``.
            shape: shape of the complete (unsharded) tensor.
            generator: random generator on the CPU.
        """
        value = torch.zeros(shape, device="cpu")
        if key == "weight":
            bound = HEAD_SCALE * shape[1] ** -0.5
            value.uniform_(-bound, bound, generator=generator)
        return value
