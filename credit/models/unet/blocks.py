"""Blocks of the U-Net. Each block is a unit of sharding, checkpointing and compilation.

Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.layers.norm import NO_CONDITION_DIMS, NO_CONDITIONS, ConditionDims, Conditions, GroupNorm
from credit.models.layers.seeded_dropout import SeededDropout
from credit.models.layers.sphere_conv import SphereConv2d
from credit.models.unet.attention import GlobalAttention
from credit.models.unet.levels import Level

# Limits of the ADM network (Dhariwal and Nichol 2021, arXiv 2105.05233): at most 32 groups of at least 4 channels.
MAX_GROUPS = 32
MIN_CHANNELS_PER_GROUP = 4


def choose_num_groups(channels: int) -> int:
    """Return the number of groups of a group norm: the largest divisor of `channels` within the limits of this module.

    There are at most `MAX_GROUPS` groups. Each group has at least `MIN_CHANNELS_PER_GROUP` channels, if possible.
    """
    largest = max(1, min(MAX_GROUPS, channels // MIN_CHANNELS_PER_GROUP))
    return max(groups for groups in range(1, largest + 1) if channels % groups == 0)


@dataclass(frozen=True)
class BlockOptions:
    """Properties that all blocks of a level share.

    Attributes:
        level: rows, columns and poles of the level.
        dim_head: channels of an attention head; None for a level without attention.
        dropout: probability of dropping a hidden channel in training.
        condition_dims: lengths of the conditions that the norms depend on.
    """

    level: Level
    dim_head: int | None = None
    dropout: float = 0.0
    condition_dims: ConditionDims = NO_CONDITION_DIMS


class ResidualBlock(nn.Module):
    """Residual branch (twice: group norm, SiLU, 3x3 convolution) added to the input; then optional attention.

    Args:
        in_channels: channels of the input, including the channels of a skip connection.
        out_channels: channels of the output.
        options: properties of the level.
    """

    _fsdp2_shard = True

    def __init__(self, in_channels: int, out_channels: int, options: BlockOptions) -> None:
        super().__init__()
        pole_skip = options.level.pole_skip
        condition_dims = options.condition_dims
        groups = choose_num_groups(out_channels)
        self.norm1 = GroupNorm(choose_num_groups(in_channels), in_channels, condition_dims)
        self.conv1 = SphereConv2d(in_channels, out_channels, skip=pole_skip)
        self.norm2 = GroupNorm(groups, out_channels, condition_dims)
        self.dropout = nn.Dropout(options.dropout)
        # Layer of `dropout` noise, set by `use_seeded_dropout`.
        self.seeded_dropout: SeededDropout | None = None
        self.conv2 = SphereConv2d(out_channels, out_channels, skip=pole_skip)
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1)
        self.attention: GlobalAttention | None = None
        if options.dim_head is not None:
            self.attention = GlobalAttention(out_channels, options.dim_head, groups, condition_dims)

    def forward(
        self, x_BCHW: Tensor, skip_BCHW: Tensor | None = None, conditions: Conditions = NO_CONDITIONS
    ) -> Tensor:
        """Return the output of the block (B, out_channels, H, W).

        Args:
            x_BCHW: output of the previous block.
            skip_BCHW: skip connection, concatenated after the channels of `x_BCHW`; None for a block without a skip
                connection.
            conditions: noise on which norms and dropout depend, at the resolution of the level.
        """
        if skip_BCHW is not None:
            x_BCHW = torch.cat((x_BCHW, skip_BCHW), dim=1)
        hidden_BCHW = self.conv1(F.silu(self.norm1(x_BCHW, conditions)))
        hidden_BCHW = F.silu(self.norm2(hidden_BCHW, conditions))
        if self.seeded_dropout is not None and conditions.dropout_seeds_BM is not None:
            # Dropout masks are computed by cell, so the channels come last.
            hidden_BHWC = self.seeded_dropout.drop_channels(
                hidden_BCHW.permute(0, 2, 3, 1), conditions.dropout_seeds_BM
            )
            hidden_BCHW = hidden_BHWC.permute(0, 3, 1, 2)
        else:
            hidden_BCHW = self.dropout(hidden_BCHW)
        x_BCHW = self.shortcut(x_BCHW) + self.conv2(hidden_BCHW)
        if self.attention is not None:
            x_BCHW = x_BCHW + self.attention(x_BCHW, conditions)
        return x_BCHW


class DownSampling(nn.Module):
    """Down-sampling by a 3x3 convolution with stride 2, centred on the rows and columns 0, 2, 4, ...

    Args:
        in_channels: channels of the finer level.
        out_channels: channels of the coarser level.
        fine: the finer level, which is the input of the convolution.
    """

    _fsdp2_shard = True

    def __init__(self, in_channels: int, out_channels: int, fine: Level) -> None:
        super().__init__()
        self.conv = SphereConv2d(in_channels, out_channels, stride=2, skip=fine.pole_skip)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the down-sampled field (B, out_channels, H / 2, W / 2); odd sizes are rounded up."""
        return self.conv(x_BCHW)


class RepeatCells(nn.Module):
    """Up-sampling that replaces each cell with 2 x 2 cells of the same value."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the field with repeated cells, (B, C, 2H, 2W)."""
        return F.interpolate(x_BCHW, scale_factor=2, mode="nearest")


class UpSampling(nn.Module):
    """Up-sampling to the finer level: each cell is repeated 2 x 2 times, then a 3x3 convolution follows.

    Args:
        in_channels: channels of the coarser level.
        out_channels: channels of the finer level.
        fine: the finer level, which is the grid of the convolution.
    """

    _fsdp2_shard = True

    def __init__(self, in_channels: int, out_channels: int, fine: Level) -> None:
        super().__init__()
        self.repeat = RepeatCells()
        self.conv = SphereConv2d(in_channels, out_channels, skip=fine.pole_skip)

    def forward(self, x_BCHW: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the up-sampled field (B, out_channels, *shape).

        Args:
            x_BCHW: field of the coarser level.
            shape: number of rows and columns of the finer level; each is at most twice the number of the coarser level.
        """
        # If the finer level has an odd number of rows, the last repeated row is dropped.
        repeated_BCHW = self.repeat(x_BCHW)[..., : shape[0], : shape[1]]
        return self.conv(repeated_BCHW)
