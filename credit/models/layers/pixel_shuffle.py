"""Up-sampling by a convolution whose channels become cells (Shi et al. 2016, arXiv 1609.05158)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit.models.initialise import kaiming_normal


def pixel_shuffle(x_BCHW: Tensor) -> Tensor:
    """Return (B, C/4, 2H, 2W): `torch.nn.PixelShuffle(2)`, but channels-last memory stays so on every device."""
    B, C, H, W = x_BCHW.shape
    x_BHWC22 = x_BCHW.permute(0, 2, 3, 1).unflatten(-1, (C // 4, 2, 2))
    return x_BHWC22.permute(0, 1, 4, 2, 5, 3).reshape(B, 2 * H, 2 * W, C // 4).permute(0, 3, 1, 2)


class SubpixelConv(nn.Conv2d):
    """3x3 convolution to 4 * `out_channels` channels and a pixel shuffle: doubles height and width."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, 4 * out_channels, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return (B, out_channels, 2H, 2W)."""
        return pixel_shuffle(super().forward(x_BCHW))

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """ICNR: the four sub-kernels of a channel start equal, so there is no checkerboard (Aitken et al. 2017)."""
        if name == "bias":
            return torch.zeros(shape, device="cpu")
        sub_kernel = kaiming_normal((shape[0] // 4, *shape[1:]), shape[1] * 9, generator)
        return sub_kernel.repeat_interleave(4, dim=0)
