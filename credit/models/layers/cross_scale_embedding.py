"""Cross-scale embedding: convolutions of several kernel sizes with one stride, concatenated over channels.

Shape suffixes: B batch, C channels, H and W rows and columns; N blocks of stride x stride cells, K their channels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.models.kernels.dispatch import use_cpu_kernels
from credit.models.kernels.patch_gather import PatchGrid, fast_fir_rows
from credit.models.kernels.recompute_cache import recall
from credit.models.kernels.recompute_linear import outside_autocast
from credit.models.layers.padding import NO_PADDING, SpherePadding


def tall_weight(weight: Tensor, stride: int) -> Tensor:
    """Return an (out, in, k, k) weight as (k/stride * out, stride^2 in, k/stride, 1).

    Output channels are ordered (column tap, out), input channels as in `PatchGrid.cut`.
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


class LargeKernelConv(torch.autograd.Function):
    """Convolutions with large kernels, each computed as a (k/stride x 1) convolution over blocks and shifted sums.

    All column taps become output channels of one tall thin convolution, and tap t of output column j is found at
    column j + t: the same sums in another order. That keeps matrix products large although a large kernel has few
    output channels.

    The field is kept for the backward pass, which makes its blocks again: they would be the largest tensor that a
    training step keeps.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_BHWC: Tensor, grid: PatchGrid, places: Tensor, *weights_and_biases: Tensor
    ) -> tuple[Tensor, ...]:
        """Return (B, *size, out) for each weight.

        Args:
            ctx: of autograd.
            x_BHWC: the field, not padded.
            grid: its blocks.
            places: of the grid.
            weights_and_biases: for each kernel its weight (out, in, k, k) and bias (out,). Every k is a multiple of
                `stride`, and two of them differ by a multiple of 2 * `stride`.
        """
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        ctx.save_for_backward(x_BHWC, *weights)
        ctx.grid, ctx.places = grid, places
        return recall(lambda: _wide_convolutions(x_BHWC, grid, places, weights, biases))

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the field, if it has one, and of each weight and bias."""
        (x_BHWC, *weights), grid, places = ctx.saved_tensors, ctx.grid, ctx.places
        wanted_field, wanted_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[3::2]
        rows = _Rows(grid, grid.cut(x_BHWC, places))
        others: list[Tensor | None] = []
        of_blocks = None
        # the widest last, and first here: it reads all blocks
        for weight, gradient, wanted in list(zip(weights, gradients, wanted_weights, strict=True))[::-1]:
            taps, first = weight.shape[-1] // grid.stride, grid.first(weight.shape[-1])
            tall = tall_weight(weight, grid.stride)
            y_BHWC = gradient.new_zeros(len(gradient), grid.size[0], grid.blocks[1], len(tall))
            column_taps(y_BHWC, taps, first, grid.size[1]).copy_(gradient.unsqueeze(-2))
            of_tall = rows.weight_gradient(y_BHWC, taps).to(weight.dtype) if wanted else None
            others.append(gradient.float().sum((0, 1, 2)).to(weight.dtype))
            others.append(None if of_tall is None else plain_weight(of_tall, grid.stride, weight.shape))
            if wanted_field:
                part = _of_rows(y_BHWC, rows.slab(taps), tall)
                if of_blocks is None:
                    of_blocks = part
                else:
                    of_blocks[:, first : first + part.shape[1]] += part
        of_field = None if of_blocks is None else grid.join(of_blocks, places, x_BHWC.shape[-1])
        return of_field, None, None, *others[::-1]


def _wide_convolutions(
    x_BHWC: Tensor, grid: PatchGrid, places: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    rows = _Rows(grid, grid.cut(x_BHWC, places))
    outputs = []
    for weight, bias in zip(weights, biases, strict=True):
        taps = weight.shape[-1] // grid.stride
        y_BHWC = rows.convolved(tall_weight(weight, grid.stride))
        # The sum is float32 also where the parts are bfloat16: 16 roundings in a row would show.
        parts = column_taps(y_BHWC.float(), taps, grid.first(weight.shape[-1]), grid.size[1])
        sums = parts.sum(-2) + bias.float()
        # torch 2.11's compiler loses the gradients of a function's result that `to` leaves as it is
        outputs.append(sums if sums.dtype == x_BHWC.dtype else sums.to(x_BHWC.dtype))
    return tuple(outputs)


class _Rows:
    """Convolutions over the rows of blocks, and gradients of their weights.

    In float32 on a CPU by `fast_fir_rows`. In bfloat16 its differences would be rounded once more.
    """

    def __init__(self, grid: PatchGrid, blocks_BHWK: Tensor) -> None:
        self._grid, self._blocks = grid, blocks_BHWK
        self._pairs: tuple[Tensor, Tensor, Tensor] | None = None

    def convolved(self, weight: Tensor) -> Tensor:
        """Return the convolution (B, size[0], columns, out), contiguous, with a weight (out, K, taps, 1)."""
        taps = weight.shape[2]
        if self._in_pairs(taps) is None:
            return _convolved(self.slab(taps), weight)
        odd, below, above = self._in_pairs(taps)
        even_taps, odd_taps = weight[:, :, ::2], weight[:, :, 1::2]
        common = _convolved(odd, even_taps + odd_taps)
        y_BHWC = common.new_empty(len(common), self._grid.size[0], *common.shape[2:])
        for parity, (rows, own) in enumerate(((below, even_taps), (above, odd_taps))):
            part = _convolved(rows, own)
            y_BHWC[:, parity::2] = part.add_(common[:, : part.shape[1]])
        return y_BHWC

    def weight_gradient(self, y_BHWC: Tensor, taps: int) -> Tensor:
        """Return the gradient (out, K, taps, 1) of the weight, float32, given that of `convolved`."""
        if self._in_pairs(taps) is None:
            return torch.stack(_tap_products(y_BHWC, self.slab(taps), taps), dim=-1).unsqueeze(-1)
        odd, below, above = self._in_pairs(taps)
        even_y, odd_y = y_BHWC[:, ::2], y_BHWC[:, 1::2]
        both = even_y.clone()
        both[:, : odd_y.shape[1]] += odd_y
        products = (_tap_products(*own, taps // 2) for own in ((both, odd), (even_y, below), (odd_y, above)))
        found = [part for common, even, odd in zip(*products, strict=True) for part in (common + even, common + odd)]
        return torch.stack(found, dim=-1).unsqueeze(-1)

    def slab(self, taps: int) -> Tensor:
        """Return the rows of blocks that a kernel reads."""
        first = self._grid.first(taps * self._grid.stride)
        return self._blocks[:, first : first + self._grid.size[0] + taps - 1]

    def _in_pairs(self, taps: int) -> list[Tensor] | None:
        """Return the rows of `fast_fir_rows` that a kernel reads, None for one that it does not suit."""
        first = self._grid.first(taps * self._grid.stride)
        suited = use_cpu_kernels(self._blocks) and self._blocks.dtype == torch.float32
        if not suited or first % 2 or taps % 2 or self._grid.size[0] < 2:
            return None
        if self._pairs is None:
            self._pairs = fast_fir_rows(self._blocks)
        counts = ((self._grid.size[0] + 1) // 2,) * 2 + (self._grid.size[0] // 2,)
        return [
            rows[:, first // 2 : first // 2 + count + taps // 2 - 1]
            for rows, count in zip(self._pairs, counts, strict=True)
        ]


def _convolved(rows_BHWK: Tensor, weight: Tensor) -> Tensor:
    y_BCHW = F.conv2d(rows_BHWK.permute(0, 3, 1, 2), weight)
    return y_BCHW.permute(0, 2, 3, 1).contiguous()


def _of_rows(y_BHWC: Tensor, rows_BHWK: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the rows that were convolved, given the result's."""
    of_rows, *_ = torch.ops.aten.convolution_backward(
        y_BHWC.permute(0, 3, 1, 2), rows_BHWK.permute(0, 3, 1, 2), weight, None,
        (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True, False, False),
    )  # fmt: skip
    return of_rows.permute(0, 2, 3, 1).contiguous()


def _tap_products(y_BHWC: Tensor, rows_BHWK: Tensor, taps: int) -> list[Tensor]:
    """Return the gradient (C, K) of each row tap, float32: a matrix product each.

    That is faster than a convolution's own, twice for 16 taps in float32 on a CPU (torch 2.13).
    """
    # as it is multiplied, or each bfloat16 product would copy it
    y_BCN, rows = y_BHWC.flatten(1, 2).transpose(1, 2).contiguous(), y_BHWC.shape[1]
    products = (y_BCN @ rows_BHWK[:, tap : tap + rows].flatten(1, 2) for tap in range(taps))
    return [product.float().sum(0) for product in products]


class CrossScaleEmbedding(nn.Module):
    """Reduce height and width by `stride` and embed into `dim` channels.

    Args:
        in_channels: channels of the input.
        dim: channels of the output; of n kernels the j-th (from 1) gives dim / 2^j, the last what remains.
        kernel_sizes: kernel edges, each at least `stride`.
        stride: common stride.
        padding: of the field.
    """

    def __init__(
        self,
        in_channels: int,
        dim: int,
        kernel_sizes: tuple[int, ...],
        stride: int,
        padding: SpherePadding = NO_PADDING,
    ) -> None:
        super().__init__()
        self.stride, self.padding = stride, padding
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
        """Return tokens (B, floor(H / stride), floor(W / stride), dim); H and W are the padded field's."""
        dtype = x_BCHW.dtype
        if not x_BCHW.is_meta and torch.is_autocast_enabled(x_BCHW.device.type):
            dtype = torch.get_autocast_dtype(x_BCHW.device.type)
        x_BCHW = x_BCHW.to(dtype).contiguous(memory_format=torch.channels_last)
        scales: dict[nn.Conv2d, Tensor] = {}
        for group in self._wide_groups():
            grid = PatchGrid(self.stride, group[-1].kernel_size[0], tuple(x_BCHW.shape[2:]), self.padding)
            given = [tensor.to(dtype) for conv in group for tensor in (conv.weight, conv.bias)]
            found = LargeKernelConv.apply(x_BCHW.permute(0, 2, 3, 1), grid, grid.places(x_BCHW.device), *given)
            scales |= zip(group, found, strict=True)
        others = [conv for conv in self.convs if conv not in scales]
        padded_BCHW = self.padding.pad(x_BCHW).contiguous(memory_format=torch.channels_last) if others else x_BCHW
        scales |= {conv: self._plain_conv(conv, padded_BCHW).permute(0, 2, 3, 1) for conv in others}
        return torch.cat([scales[conv] for conv in self.convs], dim=-1)
