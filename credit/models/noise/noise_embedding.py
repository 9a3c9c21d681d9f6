"""Layers that embed fields of noise in a network. Noise that is zero has no effect on the network.

Shape suffixes: B batch, C channels, H and W rows and columns, K channels of the noise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Hidden channels of the MLP of `CellNoiseEmbedding`.
HIDDEN_CHANNELS = 32


class NoiseLinear(nn.Linear):
    """Linear layer without bias for noise. For zeros as input, which mean no noise, the output is zero."""

    # A checkpoint may lack the weight; see `ConditionalScaleShift`.
    may_be_added = True
    has_weight_decay = False
    # `apply_spectral_norm` skips the layer.
    is_normalized = False

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)


class CellNoiseEmbedding(nn.Module):
    """Two-layer MLP and norm over the noise channels of each cell (AIFS-CRPS, Lang et al. 2024, arXiv 2412.15832).

    The layers have no biases, so the output is zero for zeros as input, which mean no noise. The norm scales the
    embedded noise of each cell to variance 1, whatever the weights are.

    Args:
        channels: channels of the noise.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.expand = NoiseLinear(channels, HIDDEN_CHANNELS)
        self.contract = NoiseLinear(HIDDEN_CHANNELS, channels)

    def forward(self, noise_BHWK: Tensor) -> Tensor:
        """Return the embedded noise, with the shape of `noise_BHWK`."""
        y_BHWK = self.contract(F.gelu(self.expand(noise_BHWK)))
        return F.layer_norm(y_BHWK, y_BHWK.shape[-1:])


class NoiseFieldEmbedding(nn.Conv2d):
    """Patch embedding of fields of noise, to be added to an embedding of the input with the same stride.

    The initial weight is zero, so adding the layer to a trained network does not change the output of the network. The
    layer has no bias, so a field of zeros, which means no noise, has no effect.

    Args:
        channels: number of fields of noise.
        dim: channels of the embedding.
        stride: edge of a patch in cells.
    """

    may_be_added = True
    has_weight_decay = False
    # Spectral norm would divide the zeros by their largest singular value.
    is_normalized = False

    def __init__(self, channels: int, dim: int, stride: int) -> None:
        super().__init__(channels, dim, stride, stride=stride, bias=False)

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return zeros of `shape`, on the CPU."""
        return torch.zeros(shape, device="cpu")


def average_noise(noise_BKHW: Tensor, stride: int) -> Tensor:
    """Average cell noise to a coarser resolution and rescale the averages to the variance of the input.

    Each coarse cell is the mean of its stride^2 fine cells, multiplied by `stride`, which restores the variance. Fine
    cells at the end of a row or column that do not fill a coarse cell are dropped.

    Args:
        noise_BKHW: fields of noise.
        stride: edge of a coarse cell in fine cells.

    Returns:
        Noise at the coarser resolution, (B, K, H // stride, W // stride).
    """
    return F.avg_pool2d(noise_BKHW, stride) * stride
