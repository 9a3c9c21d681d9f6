"""Cross-scale embedding: convolutions of several kernel sizes with one stride, concatenated over channels.

Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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
    """Return an (out, in, k, k) weight as (k/stride * out, stride^2 in, k/stride, 1).

    Output channels are ordered (column tap, out), input channels as in `to_blocks`.
    """
    out, channels, k, _ = weight.shape
    taps = k // stride
    cells = weight.view(out, channels, taps, stride, taps, stride)  # out, in, row tap, row, column tap, column
    return cells.permute(4, 0, 3, 5, 1, 2).reshape(taps * out, stride * stride * channels, taps, 1)


def from_blocks(blocks_BCHW: Tensor, stride: int, offset: int, shape: torch.Size) -> Tensor:
    """Undo `to_blocks` for a field of `shape` (B, C, H, W); cells outside it are left out."""
    B, C, H, W = shape
    rows, columns = blocks_BCHW.shape[2:]
    cells = blocks_BCHW.permute(0, 2, 3, 1).view(B, rows, columns, stride, stride, C).permute(0, 1, 3, 2, 4, 5)
    x_BHWC = cells.reshape(B, rows * stride, columns * stride, C)
    return x_BHWC[:, offset : offset + H, offset : offset + W].permute(0, 3, 1, 2)


def plain_weight(block_weight: Tensor, stride: int, shape: torch.Size) -> Tensor:
    """Undo `block_weight` for a weight of `shape` (out, in, k, k)."""
    out, channels, k, _ = shape
    taps = k // stride
    cells = block_weight.view(taps, out, stride, stride, channels, taps)  # column tap, out, row, column, in, row tap
    return cells.permute(1, 4, 5, 2, 0, 3).reshape(shape)


class WideConvolutions(torch.autograd.Function):
    """Convolutions with large kernels, each computed as a (k/stride x 1) convolution over blocks and shifted sums.

    All column taps become output channels of one tall thin convolution, and tap t of output column j is found at
    column j + t: the same sums in another order. That keeps matrix products large although a large kernel has few
    output channels: for a 32 x 32 kernel on the CPU (torch 2.13) the forward takes half as long as the plain strided
    convolution's, forward and weight gradient together a tenth.

    The field is kept for the backward pass, which makes its blocks again: they and their margins, a copy for each
    kernel, would be the largest tensors that a training step keeps.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x_BCHW: Tensor,
        stride: int,
        size: tuple[int, int],
        *weights_and_biases: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return (B, out, *size) for each weight.

        Args:
            ctx: of autograd.
            x_BCHW: the field.
            stride: of the convolutions, in cells.
            size: output rows and columns.
            weights_and_biases: for each kernel its weight (out, in, k, k), k a multiple of `stride`, and bias (out,).
        """
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        ctx.save_for_backward(x_BCHW, *weights)
        ctx.stride, ctx.size = stride, size
        outputs = []
        for (weight, blocks), bias in zip(_with_blocks(x_BCHW, weights, stride, size), biases, strict=True):
            out, taps = len(weight), weight.shape[-1] // stride
            y = F.conv2d(blocks, block_weight(weight, stride))
            first, *others = y.unflatten(1, (taps, out)).unbind(1)
            # The sum is float32 also where the parts are bfloat16: 16 roundings in a row would show.
            total = first[..., : size[1]].float() + bias.float().view(-1, 1, 1)
            for tap, part in enumerate(others, start=1):
                total += part[..., tap : tap + size[1]]
            outputs.append(total.to(y.dtype))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the field, if it has one, and of each weight and bias."""
        (x_BCHW, *weights), stride, size = ctx.saved_tensors, ctx.stride, ctx.size
        of_field: Tensor | None = None
        others: list[Tensor | None] = []
        with_blocks = _with_blocks(x_BCHW, weights, stride, size)
        wanted_field, wanted_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[3::2]
        for (weight, blocks), gradient, wanted in zip(with_blocks, gradients, wanted_weights, strict=True):
            k = weight.shape[-1]
            taps = k // stride
            parts = [F.pad(gradient, (tap, taps - 1 - tap)) for tap in range(taps)]
            of_blocks, of_tall, _ = torch.ops.aten.convolution_backward(
                torch.cat(parts, dim=1).contiguous(memory_format=torch.channels_last),
                blocks, block_weight(weight, stride), None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1,
                (wanted_field, wanted, False),
            )  # fmt: skip
            others.append(plain_weight(of_tall, stride, weight.shape) if wanted else None)
            others.append(gradient.float().sum((0, 2, 3)).to(weight.dtype))
            if wanted_field:
                around, offset = _margins(k, stride)
                part = from_blocks(F.pad(of_blocks, (-around,) * 4), stride, offset, x_BCHW.shape)
                of_field = part if of_field is None else of_field + part
        return of_field, None, None, *others


def _margins(kernel: int, stride: int) -> tuple[int, int]:
    """Return how many whole blocks of zeros surround the blocks, and how many cells before the field they begin."""
    before = (kernel - stride) // 2
    return before // stride, before % stride


def _with_blocks(
    x_BCHW: Tensor, weights: Sequence[Tensor], stride: int, size: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each weight with the blocks, and zeros around them, that it is applied to."""
    made: dict[int, Tensor] = {}
    for weight in weights:
        around, offset = _margins(weight.shape[-1], stride)
        if offset not in made:
            extra = 1 if offset else 0
            made[offset] = to_blocks(x_BCHW, stride, offset, (size[0] + extra, size[1] + extra))
        # Padded beforehand: with padding inside the convolution, oneDNN's gradients are several times slower.
        yield weight, F.pad(made[offset], (around,) * 4)


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

    def _is_wide(self, conv: nn.Conv2d, size: torch.Size) -> bool:
        """Whether the kernel is large, and its blocks hold all cells of a field of this size that it reads."""
        kernel, stride = conv.kernel_size[0], self.stride
        fits = kernel % stride == 0 and (kernel - stride) % 2 == 0
        return kernel >= 4 * stride and fits and all(n % stride <= _margins(kernel, stride)[1] for n in size)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return tokens (B, floor(H / stride), floor(W / stride), dim)."""
        size = (x_BCHW.shape[2] // self.stride, x_BCHW.shape[3] // self.stride)
        dtype = x_BCHW.dtype
        if not x_BCHW.is_meta and torch.is_autocast_enabled(x_BCHW.device.type):
            dtype = torch.get_autocast_dtype(x_BCHW.device.type)
        x_BCHW = x_BCHW.to(dtype)
        wide = [conv for conv in self.convs if self._is_wide(conv, x_BCHW.shape[2:])]
        given = [tensor.to(dtype) for conv in wide for tensor in (conv.weight, conv.bias)]
        made = iter(WideConvolutions.apply(x_BCHW, self.stride, size, *given) if wide else ())
        scales = [next(made) if conv in wide else self._plain_conv(conv, x_BCHW) for conv in self.convs]
        return torch.cat(scales, dim=1).permute(0, 2, 3, 1).contiguous()
