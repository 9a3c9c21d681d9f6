"""Cross-scale embedding: convolutions of several kernel sizes with one stride, concatenated over channels.

Shape suffixes: B batch, C channels, H and W rows and columns; N blocks of stride x stride cells, K their channels.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable


@dataclass(frozen=True)
class BlockGrid:
    """A field cut into blocks, with zeros around for kernels that are centred on them.

    Attributes:
        stride: edge of a block in cells.
        size: rows and columns of blocks that have an output.
        widest: edge of the largest kernel in cells.
    """

    stride: int
    size: tuple[int, int]
    widest: int

    @property
    def before(self) -> int:
        """Cells from the first block's edge to the field's."""
        return (self.widest - self.stride) // 2

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of blocks, those around the field included."""
        rows, columns = (n + self.widest // self.stride - 1 for n in self.size)
        return rows, columns

    def first(self, kernel: int) -> int:
        """Return the first row and column of blocks that a smaller kernel reads."""
        return (self.widest - kernel) // 2 // self.stride

    def cut(self, x_BCHW: Tensor) -> Tensor:
        """Return the blocks (B, *blocks, stride^2 C), their channels ordered (row, column, C)."""
        B, C, H, W = x_BCHW.shape
        stride, before = self.stride, self.before
        cells = x_BCHW.new_empty(B, *self.blocks, stride, stride, C)
        for dim, size in ((1, H), (2, W)):
            last = (before + size) // stride
            cells.narrow(dim, 0, before // stride + 1).zero_()
            cells.narrow(dim, last, cells.shape[dim] - last).zero_()
        for row, column in itertools.product(range(stride), repeat=2):
            h, w = (row - before) % stride, (column - before) % stride
            part = x_BCHW[:, :, h::stride, w::stride].permute(0, 2, 3, 1)
            i, j = (before + h) // stride, (before + w) // stride
            cells[:, i : i + part.shape[1], j : j + part.shape[2], row, column] = part
        return cells.flatten(3)

    def join(self, blocks_BHWK: Tensor, shape: torch.Size) -> Tensor:
        """Undo `cut` for a field of `shape` (B, C, H, W); cells outside it are left out."""
        B, C, H, W = shape
        (rows, columns), stride, before = self.blocks, self.stride, self.before
        cells = blocks_BHWK.view(B, rows, columns, stride, stride, C).permute(0, 1, 3, 2, 4, 5)
        x_BHWC = cells.reshape(B, rows * stride, columns * stride, C)
        return x_BHWC[:, before : before + H, before : before + W].permute(0, 3, 1, 2)


def tall_weight(weight: Tensor, stride: int) -> Tensor:
    """Return an (out, in, k, k) weight as (k/stride * out, stride^2 in, k/stride, 1).

    Output channels are ordered (column tap, out), input channels as in `BlockGrid.cut`.
    """
    out, channels, k, _ = weight.shape
    taps = k // stride
    cells = weight.view(out, channels, taps, stride, taps, stride)  # out, in, row tap, row, column tap, column
    return cells.permute(4, 0, 3, 5, 1, 2).reshape(taps * out, stride * stride * channels, taps, 1)


def plain_weight(tall_weight: Tensor, stride: int, shape: torch.Size) -> Tensor:
    """Undo `tall_weight` for a weight of `shape` (out, in, k, k)."""
    out, channels, k, _ = shape
    taps = k // stride
    cells = tall_weight.view(taps, out, stride, stride, channels, taps)  # column tap, out, row, column, in, row tap
    return cells.permute(1, 4, 5, 2, 0, 3).reshape(shape)


def column_taps(y_BHWC: Tensor, taps: int, first: int, columns: int) -> Tensor:
    """Return channels (column tap, out) as a view (B, H, columns, taps, out), tap t of column j from first + j + t.

    `y_BHWC` is contiguous and begins where its memory does.
    """
    B, H, _, C = y_BHWC.shape
    b, h, w, _ = y_BHWC.stride()
    out = C // taps
    return y_BHWC.as_strided((B, H, columns, taps, out), (b, h, w, w + out, 1), first * w)


class WideConvolutions(torch.autograd.Function):
    """Convolutions with large kernels, each computed as a (k/stride x 1) convolution over blocks and shifted sums.

    All column taps become output channels of one tall thin convolution, and tap t of output column j is found at
    column j + t: the same sums in another order. That keeps matrix products large although a large kernel has few
    output channels.

    The field is kept for the backward pass, which makes its blocks again: they would be the largest tensor that a
    training step keeps.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_BCHW: Tensor, stride: int, size: tuple[int, int], *weights_and_biases: Tensor
    ) -> tuple[Tensor, ...]:
        """Return (B, *size, out) for each weight.

        Args:
            ctx: of autograd.
            x_BCHW: the field.
            stride: of the convolutions, in cells.
            size: output rows and columns.
            weights_and_biases: for each kernel its weight (out, in, k, k) and bias (out,). Every k is a multiple of
                `stride`, and two of them differ by a multiple of 2 * `stride`.
        """
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        grid = BlockGrid(stride, size, max(weight.shape[-1] for weight in weights))
        ctx.save_for_backward(x_BCHW, *weights)
        ctx.grid = grid
        outputs = []
        for (weight, first, slab_BHWK), bias in zip(_slabs(grid, x_BCHW, weights), biases, strict=True):
            y_BCHW = F.conv2d(slab_BHWK.permute(0, 3, 1, 2), tall_weight(weight, stride))
            parts = column_taps(y_BCHW.permute(0, 2, 3, 1).contiguous(), weight.shape[-1] // stride, first, size[1])
            # The sum is float32 also where the parts are bfloat16: 16 roundings in a row would show.
            outputs.append((parts.sum(-2, dtype=torch.float32) + bias.float()).to(x_BCHW.dtype))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the field, if it has one, and of each weight and bias."""
        (x_BCHW, *weights), grid = ctx.saved_tensors, ctx.grid
        wanted_field, wanted_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[3::2]
        of_blocks = x_BCHW.new_zeros(_block_shape(grid, x_BCHW)) if wanted_field else None
        others: list[Tensor | None] = []
        slabs = _slabs(grid, x_BCHW, weights)
        for (weight, first, slab_BHWK), gradient, wanted in zip(slabs, gradients, wanted_weights, strict=True):
            taps = weight.shape[-1] // grid.stride
            tall = tall_weight(weight, grid.stride)
            y_BHWC = gradient.new_zeros(len(gradient), grid.size[0], grid.blocks[1], len(tall))
            column_taps(y_BHWC, taps, first, grid.size[1]).copy_(gradient.unsqueeze(-2))
            of_tall = _weight_gradient(y_BHWC, slab_BHWK, taps) if wanted else None
            others.append(None if of_tall is None else plain_weight(of_tall, grid.stride, weight.shape))
            others.append(gradient.float().sum((0, 1, 2)).to(weight.dtype))
            if of_blocks is not None:
                part, *_ = torch.ops.aten.convolution_backward(
                    y_BHWC.permute(0, 3, 1, 2), slab_BHWK.permute(0, 3, 1, 2), tall, None,
                    (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True, False, False),
                )  # fmt: skip
                of_blocks[:, first : first + slab_BHWK.shape[1]] += part.permute(0, 2, 3, 1)
        of_field = None if of_blocks is None else grid.join(of_blocks, x_BCHW.shape)
        return of_field, None, None, *others


def _block_shape(grid: BlockGrid, x_BCHW: Tensor) -> tuple[int, ...]:
    return len(x_BCHW), *grid.blocks, grid.stride**2 * x_BCHW.shape[1]


def _slabs(grid: BlockGrid, x_BCHW: Tensor, weights: Sequence[Tensor]) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield each weight with the first column of blocks that it reads, and the rows of blocks."""
    blocks_BHWK = grid.cut(x_BCHW)
    for weight in weights:
        first = grid.first(weight.shape[-1])
        yield weight, first, blocks_BHWK[:, first : blocks_BHWK.shape[1] - first]


def _weight_gradient(y_BHWC: Tensor, slab_BHWK: Tensor, taps: int) -> Tensor:
    """Return the gradient (C, K, taps, 1) of a tall weight: for each row tap one matrix product.

    That is faster than a convolution's own, twice for 16 taps in float32 on a CPU (torch 2.13).
    """
    # as it is multiplied, or each bfloat16 product would copy it
    y_BCN, rows = y_BHWC.flatten(1, 2).transpose(1, 2).contiguous(), y_BHWC.shape[1]
    products = [y_BCN @ slab_BHWK[:, tap : tap + rows].flatten(1, 2) for tap in range(taps)]
    return torch.stack([product.float().sum(0) for product in products], dim=-1).unsqueeze(-1).to(y_BHWC.dtype)


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

    def _wide_groups(self) -> list[list[nn.Conv2d]]:
        """Return the large kernels, and those that read the same blocks."""
        stride, groups = self.stride, defaultdict(list)
        for conv in self.convs:
            kernel = conv.kernel_size[0]
            if kernel % stride == 0 and (kernel - stride) % 2 == 0:
                groups[kernel % (2 * stride)].append(conv)
        return [group for group in groups.values() if group[-1].kernel_size[0] >= 4 * stride]

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return tokens (B, floor(H / stride), floor(W / stride), dim)."""
        size = (x_BCHW.shape[2] // self.stride, x_BCHW.shape[3] // self.stride)
        dtype = x_BCHW.dtype
        if not x_BCHW.is_meta and torch.is_autocast_enabled(x_BCHW.device.type):
            dtype = torch.get_autocast_dtype(x_BCHW.device.type)
        x_BCHW = x_BCHW.to(dtype)
        scales: dict[nn.Conv2d, Tensor] = {}
        for group in self._wide_groups():
            given = [tensor.to(dtype) for conv in group for tensor in (conv.weight, conv.bias)]
            scales |= zip(group, WideConvolutions.apply(x_BCHW, self.stride, size, *given), strict=True)
        for conv in self.convs:
            if conv not in scales:
                scales[conv] = self._plain_conv(conv, x_BCHW).permute(0, 2, 3, 1)
        return torch.cat([scales[conv] for conv in self.convs], dim=-1)
