"""Up-sampling blocks of WXFormer's decoder, on (B, C, H, W) tensors in channels-last memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit.models.kernels.merged_head import WHOLE, Margins, SubpixelHead, TransposedHead
from credit.models.layers.pixel_shuffle import SubpixelConv


class GroupNorm(nn.GroupNorm):
    """Group norm that is float32 under autocast on every device.

    torch does that on GPUs; on a CPU it takes bfloat16, and several times as long (torch 2.13).
    """

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the normalised field, (B, C, H, W)."""
        # the meta device has no autocast
        if not x_BCHW.is_meta and torch.is_autocast_enabled(x_BCHW.device.type):
            x_BCHW = x_BCHW.float()
        return super().forward(x_BCHW)


class Refinement(nn.Sequential):
    """Twice a 3x3 convolution, group norm and SiLU; added to its input by the caller."""

    def __init__(self, channels: int, groups: int) -> None:
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Conv2d(channels, channels, 3, padding=1), GroupNorm(groups, channels), nn.SiLU()]
        super().__init__(*layers)


class UpBlockPS(nn.Module):
    """Pixel-shuffle up-sampling, a sharpening residual and a refinement residual."""

    _fsdp2_shard = True

    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.up = SubpixelConv(in_channels, out_channels)
        self.sharp = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.refine = Refinement(out_channels, groups)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return (B, out_channels, 2H, 2W)."""
        x_BCHW = self.up(x_BCHW)
        x_BCHW = x_BCHW + self.sharp(x_BCHW)
        return x_BCHW + self.refine(x_BCHW)


class UpBlock(nn.Module):
    """Transposed-convolution up-sampling and a refinement residual."""

    _fsdp2_shard = True

    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, out_channels, 2, stride=2)
        self.refine = Refinement(out_channels, groups)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return (B, out_channels, 2H, 2W)."""
        x_BCHW = self.up(x_BCHW)
        return x_BCHW + self.refine(x_BCHW)


class Decoder(nn.Module):
    """From the four stages' outputs to the padded output field.

    Args:
        kind: `pixel_shuffle` or `transposed`.
        dim: channels of the four encoder stages, each twice the one before.
        out_channels: channels of the output field, output frames included.
    """

    def __init__(self, kind: str, dim: tuple[int, ...], out_channels: int) -> None:
        super().__init__()
        block = UpBlockPS if kind == "pixel_shuffle" else UpBlock
        # Blocks after the first, and the head, also take a skip connection as wide as the block before them.
        self.blocks = nn.ModuleList(
            [block(dim[3], dim[2], dim[0]), block(2 * dim[2], dim[1], dim[0]), block(2 * dim[1], dim[0], dim[0])]
        )
        head = SubpixelHead if kind == "pixel_shuffle" else TransposedHead
        self.head = head(2 * dim[0], out_channels)

    def forward(self, stages: list[Tensor], margins: Margins = WHOLE) -> Tensor:
        """Return (B, out_channels, 2H, 2W) from the stages' outputs (B, dim[i], H / 2^i, W / 2^i), less the margins.

        Args:
            stages: outputs of the four stages.
            margins: rows of the output to leave out at the beginning and at the end, and columns, as (rows, columns).
                The head, which has most of the decoder's cells, does not compute them.
        """
        x_BCHW = stages[3]
        for block, skip in zip(self.blocks, reversed(stages[:3]), strict=True):
            x_BCHW = torch.cat((block(x_BCHW), skip), dim=1)
        return self.head(x_BCHW, margins)
