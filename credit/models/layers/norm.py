"""Norms of convolutional blocks and norms that depend on a condition.

Shape suffixes: B batch, C channels, H and W rows and columns, K channels of the condition.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.kernels.autocast import autocast_dtype


class GroupNorm(nn.GroupNorm):
    """Group norm that computes in float32 under autocast on every device.

    torch does so on GPUs. On a CPU it takes bfloat16, and several times as long (torch 2.13).
    """

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the normalised field (B, C, H, W), in float32 under autocast."""
        if autocast_dtype(x_BCHW) is not None:
            x_BCHW = x_BCHW.float()
        return super().forward(x_BCHW)


class ConditionalLayerNorm(nn.Module):
    """Layer norm over the last dimension whose scale and shift are linear in a condition (Perez et al. 2018, FiLM).

    The condition is one vector a sample, such as an embedding of noise or lead time. Weight and bias start as zeros, so
    a new layer is a plain layer norm. They are parameters of this module, not of a linear layer, because spectral norm
    would divide the zeros by their largest singular value.

    Args:
        dim: channels that are normalised.
        condition_dim: channels of the condition.
        eps: added to the variance.
    """

    def __init__(self, dim: int, condition_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(2 * dim, condition_dim))
        self.bias = nn.Parameter(torch.zeros(2 * dim))

    def forward(self, x_BHWC: Tensor, condition_BK: Tensor) -> Tensor:
        """Return the normalised tokens.

        Args:
            x_BHWC: tokens (B, ..., C).
            condition_BK: condition of each sample.

        Returns:
            Tokens of the same shape as `x_BHWC`.
        """
        scale_and_shift_BC = F.linear(condition_BK, self.weight, self.bias)
        batch = len(condition_BK)
        inner_dims = [1] * (x_BHWC.dim() - 2)
        scale, shift = scale_and_shift_BC.view(batch, *inner_dims, 2 * self.dim).chunk(2, dim=-1)
        return F.layer_norm(x_BHWC, (self.dim,), eps=self.eps) * (1 + scale) + shift

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return zeros of `shape`, on the CPU."""
        return torch.zeros(shape, device="cpu")
