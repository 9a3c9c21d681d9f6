"""Cross-scale embedding: convolutions of several kernel sizes with one stride, concatenated over channels.

Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def to_blocks(x_BCHW: Tensor, stride: int, offset: int, blocks: tuple[int, int]) -> Tensor:
    """Return (B, stride^2 C, *blocks) in channels-last memory: the cells of a block become channels (row, column, C).

    The first block starts `offset` cells before the field; cells outside the field are zero.
    """
    B, C, H, W = x_BCHW.shape
    rows, columns = blocks
    after = (columns * stride - offset - W, rows * stride - offset - H)
    x_BHWC = F.pad(x_BCHW, (offset, after[0], offset, after[1])).permute(0, 2, 3, 1)
    cells = x_BHWC.reshape(B, rows, stride, columns, stride, C).permute(0, 1, 3, 2, 4, 5)
    return cells.reshape(B, rows, columns, stride * stride * C).permute(0, 3, 1, 2)


def block_weight(weight: Tensor, stride: int) -> Tensor:
    """Return an (out, in, k, k) weight as (k/stride * out, stride^2 in, k/stride, 1), for `wide_conv`.

    Output channels are ordered (column tap, out), input channels as in `to_blocks`.
    """
    out, channels, k, _ = weight.shape
    taps = k // stride
    cells = weight.view(out, channels, taps, stride, taps, stride)  # out, in, row tap, row, column tap, column
    return cells.permute(4, 0, 3, 5, 1, 2).reshape(taps * out, stride * stride * channels, taps, 1)


def wide_conv(blocks_BCHW: Tensor, weight: Tensor, bias: Tensor, stride: int, size: tuple[int, int]) -> Tensor:
    """Convolution with a large kernel, computed exactly as a (k/stride x 1) convolution over blocks and shifted sums.

    All column taps become output channels of one tall thin convolution, and tap t of output column j is found at
    column j + t. That keeps matrix products large although a large kernel has few output channels: for a 32 x 32
    kernel on the CPU (torch 2.13) the forward takes half as long as the plain strided convolution's, forward and
    weight gradient together a tenth.

    Args:
        blocks_BCHW: from `to_blocks` with the offset and extent of `CrossScaleEmbedding`.
        weight: (out, in, k, k), k a multiple of `stride`.
        bias: (out,).
        stride: the convolution's stride in cells.
        size: output rows and columns.

    Returns:
        (B, out, *size).
    """
    out, _, k, _ = weight.shape
    taps = k // stride
    around = (k - stride) // 2 // stride  # whole blocks of zero padding on each side
    # Padded beforehand: with padding inside the convolution, oneDNN's gradients are several times slower.
    y = F.conv2d(F.pad(blocks_BCHW, (around,) * 4), block_weight(weight, stride))
    first, *others = y.unflatten(1, (taps, out)).unbind(1)
    # The sum is float32 also where the parts are bfloat16: 16 roundings in a row would show.
    total = first[..., : size[1]].float() + bias.float().view(-1, 1, 1)
    for tap, part in enumerate(others, start=1):
        total = total + part[..., tap : tap + size[1]]
    return total.to(y.dtype)


class CrossScaleEmbedding(nn.Module):
    """Reduce height and width by `stride` and embed into `dim` channels.

    Args:
        in_channels: channels of the input.
        dim: channels of the output; of n kernels the j-th (from 1) gives dim / 2^j, the last what remains.
        kernel_sizes: kernel edges, each at least `stride`.
        stride: common stride.
    """

    def __init__(self, in_channels: int, dim: int, kernel_sizes: tuple[int, ...], stride: int) -> None:
        super().__init__()
        self.stride = stride
        widths = [dim // 2**j for j in range(1, len(kernel_sizes))]
        widths.append(dim - sum(widths))
        self.convs = nn.ModuleList(
            nn.Conv2d(in_channels, width, kernel, stride=stride)
            for kernel, width in zip(sorted(kernel_sizes), widths, strict=True)
        )

    def _plain_conv(self, conv: nn.Conv2d, x_BCHW: Tensor) -> Tensor:
        excess = conv.kernel_size[0] - self.stride
        before, odd = excess // 2, excess % 2
        if odd:  # the extra cell of padding goes right and below
            x_BCHW = F.pad(x_BCHW, (0, 1, 0, 1))
        return F.conv2d(x_BCHW, conv.weight, conv.bias, self.stride, before)

    def _is_wide(self, kernel: int) -> bool:
        return kernel >= 4 * self.stride and kernel % self.stride == 0 and (kernel - self.stride) % 2 == 0

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return tokens (B, floor(H / stride), floor(W / stride), dim)."""
        s = self.stride
        rows, columns = size = (x_BCHW.shape[2] // s, x_BCHW.shape[3] // s)
        blocks: dict[int, Tensor] = {}
        scales = []
        for conv in self.convs:
            kernel = conv.kernel_size[0]
            if not self._is_wide(kernel):
                scales.append(self._plain_conv(conv, x_BCHW))
                continue
            offset = (kernel - s) // 2 % s  # 0 or s / 2, see `_is_wide`
            if offset not in blocks:
                extra = 1 if offset else 0
                blocks[offset] = to_blocks(x_BCHW, s, offset, (rows + extra, columns + extra))
            scales.append(wide_conv(blocks[offset], conv.weight, conv.bias, s, size))
        return torch.cat(scales, dim=1).permute(0, 2, 3, 1).contiguous()
