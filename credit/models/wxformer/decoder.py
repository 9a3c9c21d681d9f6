"""Decoder of WXFormer: a convolutional U-Net from the stages of the encoder to the field."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit.models.kernels.merged_head import WHOLE, Margins
from credit.models.layers.up_sampling import SubpixelHead, TransposedHead, UpBlock, UpBlockPS


class Decoder(nn.Module):
    """Decoder from the outputs of the four encoder stages to the padded output field.

    Args:
        kind: `pixel_shuffle` or `transposed`.
        dim: channels of the four encoder stages, each twice the one before.
        out_channels: channels of the output field, output frames included.
    """

    def __init__(self, kind: str, dim: tuple[int, ...], out_channels: int) -> None:
        super().__init__()
        block, head = (UpBlockPS, SubpixelHead) if kind == "pixel_shuffle" else (UpBlock, TransposedHead)
        groups = dim[0]
        # The first block reads the coarsest stage. The others, and the head, read the block before them and a skip
        # connection of the same width.
        self.blocks = nn.ModuleList(
            [
                block(dim[3], dim[2], groups),
                block(2 * dim[2], dim[1], groups),
                block(2 * dim[1], dim[0], groups),
            ]
        )
        self.head = head(2 * dim[0], out_channels)

    def forward(self, stage_outputs: list[Tensor], margins: Margins = WHOLE) -> Tensor:
        """Return the field (B, out_channels, 2H, 2W), less the margins.

        Args:
            stage_outputs: (B, dim[i], H / 2^i, W / 2^i) for each of the four stages.
            margins: output rows (north, south) and columns (west, east) that are left out. The head, which has most of
                the decoder's cells, does not compute them.
        """
        *skips, x_BCHW = stage_outputs
        for block, skip_BCHW in zip(self.blocks, reversed(skips), strict=True):
            x_BCHW = torch.cat((block(x_BCHW), skip_BCHW), dim=1)
        return self.head(x_BCHW, margins)
