"""Norms of convolutional blocks and norms that depend on a condition.

Shape suffixes: B batch, C channels, H and W rows and columns, K channels of the condition.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.kernels.autocast import autocast_dtype


class ConditionalScaleShift(nn.Module):
    """Scale and shift of channels that are linear in a condition (FiLM, Perez et al. 2018, arXiv 1709.07871).

    Placed after a norm, it makes the norm depend on a vector for each sample, such as noise or lead time. The weight
    starts as zeros, so adding the layer to a trained network leaves its function unchanged. The weight is a parameter
    of this module, not of a linear layer, because spectral norm would divide the zeros by their largest singular value.

    Args:
        dim: channels that are scaled and shifted.
        condition_dim: length of the condition.
        channel_dim: dimension of the channels: -1 for tokens (B, ..., C), 1 for fields (B, C, H, W).
    """

    # A file of weights may lack the weight, which then starts as zeros.
    may_be_added = True
    # Decay of the weight would pull the spread of an ensemble towards zero.
    has_weight_decay = False

    def __init__(self, dim: int, condition_dim: int, channel_dim: int = -1) -> None:
        super().__init__()
        self.dim = dim
        self.channel_dim = channel_dim
        self.weight = nn.Parameter(torch.zeros(2 * dim, condition_dim))

    def forward(self, x: Tensor, condition_BK: Tensor) -> Tensor:
        """Return x * (1 + scale) + shift, in the shape of `x`, with a scale and a shift for each sample and channel.

        Args:
            x: normalised tokens or fields.
            condition_BK: condition of each sample.
        """
        scale_BC, shift_BC = F.linear(condition_BK.to(self.weight.dtype), self.weight).chunk(2, dim=-1)
        shape = [len(x)] + [1] * (x.dim() - 1)
        shape[self.channel_dim] = self.dim
        return torch.addcmul(shift_BC.view(shape), x, 1 + scale_BC.view(shape))

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return zeros of `shape`, on the CPU."""
        return torch.zeros(shape, device="cpu")


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension that may depend on a condition.

    Args:
        dim: channels.
        condition_dim: length of the condition; 0 for none.
    """

    def __init__(self, dim: int, condition_dim: int = 0) -> None:
        super().__init__(dim)
        self.scale_shift = ConditionalScaleShift(dim, condition_dim) if condition_dim else None

    def forward(self, x: Tensor, condition_BK: Tensor | None = None) -> Tensor:
        """Return the normalised tokens (B, ..., C), given the condition of each sample (None for none)."""
        normed = super().forward(x)
        if condition_BK is None or self.scale_shift is None:
            return normed
        return self.scale_shift(normed, condition_BK)


class GroupNorm(nn.GroupNorm):
    """Group norm that may depend on a condition, and that computes in float32 under autocast on every device.

    torch does so on GPUs. On a CPU it takes bfloat16, and several times as long (torch 2.13).

    Args:
        groups: number of groups; divides `channels`.
        channels: channels.
        condition_dim: length of the condition; 0 for none.
    """

    def __init__(self, groups: int, channels: int, condition_dim: int = 0) -> None:
        super().__init__(groups, channels)
        self.scale_shift = ConditionalScaleShift(channels, condition_dim, channel_dim=1) if condition_dim else None

    def forward(self, x_BCHW: Tensor, condition_BK: Tensor | None = None) -> Tensor:
        """Return the normalised field (B, C, H, W), in float32 under autocast.

        Args:
            x_BCHW: field.
            condition_BK: condition of each sample, None for none.
        """
        if autocast_dtype(x_BCHW) is not None:
            x_BCHW = x_BCHW.float()
        normed_BCHW = super().forward(x_BCHW)
        if condition_BK is None or self.scale_shift is None:
            return normed_BCHW
        return self.scale_shift(normed_BCHW, condition_BK)
