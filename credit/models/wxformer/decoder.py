"""Up-sampling blocks of WXFormer's decoder, on (B, C, H, W) tensors in channels-last memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from credit.models.initialise import kaiming_normal

# cells around those that are kept whose values the head reads: two 3x3 convolutions, one of them at twice the cells
HALO = 2


def head_window(size: int, before: int, after: int) -> tuple[slice, slice]:
    """Return which of `size` cells the head is given, and what is kept of the cells, twice as many, that it makes.

    Args:
        size: rows or columns of the head's input.
        before: rows or columns of its whole output that are not wanted at the beginning.
        after: those at the end.
    """
    first, last = max(before // 2 - HALO, 0), min(size - after // 2 + HALO, size)
    return slice(first, last), slice(before - 2 * first, 2 * (size - first) - after)


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
        if kind == "pixel_shuffle":
            self.head: nn.Module = nn.Sequential(
                SubpixelConv(2 * dim[0], out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1)
            )
        else:
            self.head = nn.ConvTranspose2d(2 * dim[0], out_channels, 4, stride=2, padding=1)

    def forward(self, stages: list[Tensor], margins: Sequence[tuple[int, int]] = ((0, 0), (0, 0))) -> Tensor:
        """Return (B, out_channels, 2H, 2W) from the stages' outputs (B, dim[i], H / 2^i, W / 2^i), less the margins.

        Args:
            stages: outputs of the four stages.
            margins: rows of the output to leave out at the beginning and at the end, and columns, as (rows, columns).
                The head, which has most of the decoder's cells, does not compute them.
        """
        x_BCHW = stages[3]
        for block, skip in zip(self.blocks, reversed(stages[:3]), strict=True):
            x_BCHW = torch.cat((block(x_BCHW), skip), dim=1)
        windows = [head_window(n, *margin) for n, margin in zip(x_BCHW.shape[2:], margins, strict=True)]
        (rows, kept_rows), (columns, kept_columns) = windows
        return self.head(x_BCHW[..., rows, columns])[..., kept_rows, kept_columns]
