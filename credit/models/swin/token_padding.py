"""Layers that add zeros around a grid of tokens, and that crop a field.

Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

# Numbers of rows (north, south) and of columns (west, east) to add or remove.
Pads = tuple[tuple[int, int], tuple[int, int]]


class TokenPadding(nn.Module):
    """Layer that adds zeros around the tokens, to complete windows.

    Args:
        pads: numbers of rows and columns to add.
    """

    def __init__(self, pads: Pads) -> None:
        super().__init__()
        self.pads = pads

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Return the tokens padded with zeros, (B, H + rows, W + columns, C)."""
        if not any((*self.pads[0], *self.pads[1])):
            return x_BHWC
        return F.pad(x_BHWC, (0, 0, *self.pads[1], *self.pads[0]))


class Crop(nn.Module):
    """Layer that removes rows and columns at the edges of a field.

    Args:
        pads: numbers of rows and columns to remove.
    """

    def __init__(self, pads: Pads) -> None:
        super().__init__()
        self.pads = pads

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the cropped field (B, C, H - rows, W - columns), as a view."""
        (north, south), (west, east) = self.pads
        return x_BCHW[..., north : x_BCHW.shape[-2] - south, west : x_BCHW.shape[-1] - east]
