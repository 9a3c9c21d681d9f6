"""Strided convolutions with large kernels and few output channels.

WXFormer has a convolution from 80 to 4 channels with kernels of 32 x 32 cells and stride 2. In the plain formulation,
this convolution takes more time than any other operation of WXFormer, because it has few output channels.

The functions of this module divide the field into patches of stride x stride cells. A convolution kernel of k x k cells
then covers k / stride rows of patches (row taps) and k / stride columns of patches (column taps). The convolution has
two steps:

1. A convolution over rows, with kernels of k / stride x 1 patches, multiplies each column of patches by the weights of
   all column taps. The products of each column tap are separate output channels.
2. Output column j is a sum over the column taps: the product of tap t is taken from column j + t.

The result consists of the same sums as in the plain formulation, computed in a different order with larger matrix
products.

Shape suffixes: B batch, C channels, H and W rows and columns (of cells in a field, otherwise of patches), K channels of
a patch (stride * stride * C), N patches of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.models.kernels.autocast import backward_without_autocast
from credit.models.kernels.patch_gather import PatchGrid
from credit.models.kernels.recompute_cache import cache_across_recompute


def strided_conv(x_BCHW: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """Plain formulation of one convolution; each output cell is centred on a patch of stride x stride cells.

    Args:
        x_BCHW: padded field of H x W cells.
        weight: (out, C, k, k), with k at least `stride`.
        bias: (out,).
        stride: stride of the convolution and edge of a patch, in cells.

    Returns:
        Convolved field (B, out, H // stride, W // stride).
    """
    before, after = compute_halo(weight.shape[-1], stride)
    if after > before:
        # If the number of zeros is odd, the additional zero is at the right and at the bottom.
        x_BCHW = F.pad(x_BCHW, (0, 1, 0, 1))
    return F.conv2d(x_BCHW, weight, bias, stride, before)


def compute_halo(kernel: int, stride: int) -> tuple[int, int]:
    """Return the numbers of cells that a kernel reads before and after the `stride` cells on which it is centred.

    Args:
        kernel: edge of the kernel in cells.
        stride: stride of the convolution in cells.
    """
    num_around = kernel - stride
    return num_around // 2, num_around - num_around // 2


def large_kernel_convs(
    x_BHWC: Tensor, grid: PatchGrid, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the convolutions of one padded field with several large kernels.

    Args:
        x_BHWC: field of H x W cells without padding; `grid` adds the padding.
        grid: patches of the padded field.
        weights: (out, C, k, k) for each kernel, from the smallest to the largest. Every k is a multiple of the stride,
            and any two k differ by a multiple of twice the stride.
        biases: (out,) for each kernel.

    Returns:
        Convolved field (B, *grid.output_shape, out) for each kernel.
    """
    return _LargeKernelConvs.apply(x_BHWC, grid, grid.gather_index(x_BHWC.device), len(weights), *weights, *biases)


class _LargeKernelConvs(torch.autograd.Function):
    """Autograd function of `large_kernel_convs`, which saves only the field and the weights for the backward pass.

    The backward pass gathers the patches again, because they would be the largest tensor that a training step saves.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x_BHWC: Tensor,
        grid: PatchGrid,
        gather_index: Tensor,
        num_kernels: int,
        *weights_and_biases: Tensor,
    ) -> tuple[Tensor, ...]:
        weights = weights_and_biases[:num_kernels]
        biases = weights_and_biases[num_kernels:]
        ctx.save_for_backward(x_BHWC, *weights)
        ctx.grid = grid
        ctx.gather_index = gather_index
        return cache_across_recompute(lambda: _convolve(x_BHWC, grid, gather_index, weights, biases))

    @staticmethod
    @once_differentiable
    @backward_without_autocast
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_BHWC, *weights = ctx.saved_tensors
        grid = ctx.grid
        num_kernels = len(weights)
        # The first four arguments of forward are the field, the grid, the index and the number of kernels.
        needs_grad_field = ctx.needs_input_grad[0]
        needs_grad_weights = ctx.needs_input_grad[4 : 4 + num_kernels]
        needs_grad_biases = ctx.needs_input_grad[4 + num_kernels :]
        patches_BHWK = grid.unfold(x_BHWC, ctx.gather_index)
        sum_dtype = torch.promote_types(x_BHWC.dtype, torch.float32)
        grad_weights: list[Tensor | None] = [None] * num_kernels
        grad_biases: list[Tensor | None] = [None] * num_kernels
        grad_patches = None
        # Iterate from the largest kernel, which reads all patches, to the smallest.
        for i in reversed(range(num_kernels)):
            weight = weights[i]
            grad_BHWC = gradients[i]
            taps = weight.shape[-1] // grid.stride
            first_patch = grid.first_patch(weight.shape[-1])
            rows_BHWK = _select_patch_rows(patches_BHWK, grid, weight.shape[-1])
            row_weight = to_row_weight(weight, grid.stride)
            # An output column is the sum of its column taps, so each column tap has the gradient of the output column.
            grad_y_BHWC = grad_BHWC.new_zeros(len(grad_BHWC), grid.output_shape[0], grid.shape[1], len(row_weight))
            view_column_taps(grad_y_BHWC, taps, first_patch, grid.output_shape[1]).copy_(grad_BHWC.unsqueeze(-2))
            if needs_grad_biases[i]:
                grad_biases[i] = grad_BHWC.to(sum_dtype).sum((0, 1, 2)).to(weight.dtype)
            if needs_grad_weights[i]:
                grad_row_weight = _compute_weight_gradient(grad_y_BHWC, rows_BHWK, taps).to(weight.dtype)
                grad_weights[i] = from_row_weight(grad_row_weight, grid.stride, weight.shape)
            if needs_grad_field:
                grad_rows = _compute_input_gradient(grad_y_BHWC, rows_BHWK, row_weight)
                # The gradient of the largest kernel has all rows of patches; the other gradients are added to it.
                if grad_patches is None:
                    grad_patches = grad_rows
                else:
                    grad_patches[:, first_patch : first_patch + grad_rows.shape[1]] += grad_rows
        grad_field = None
        if grad_patches is not None:
            grad_field = grid.fold(grad_patches, ctx.gather_index, x_BHWC.shape[-1])
        return grad_field, None, None, None, *grad_weights, *grad_biases


def _convolve(
    x_BHWC: Tensor, grid: PatchGrid, gather_index: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the results of `large_kernel_convs`; `gather_index` is the result of `PatchGrid.gather_index`."""
    patches_BHWK = grid.unfold(x_BHWC, gather_index)
    outputs = []
    for weight, bias in zip(weights, biases, strict=True):
        kernel = weight.shape[-1]
        rows_BHWK = _select_patch_rows(patches_BHWK, grid, kernel)
        # The convolution over rows computes all column taps as separate output channels.
        y_BCHW = F.conv2d(rows_BHWK.permute(0, 3, 1, 2), to_row_weight(weight, grid.stride))
        y_BHWC = y_BCHW.permute(0, 2, 3, 1).contiguous()
        # The sum is in float32 even if the taps are bfloat16, because the errors of 16 roundings would add up.
        y_BHWC = y_BHWC.to(torch.promote_types(y_BHWC.dtype, torch.float32))
        taps_BHWTC = view_column_taps(y_BHWC, kernel // grid.stride, grid.first_patch(kernel), grid.output_shape[1])
        sums = taps_BHWTC.sum(-2) + bias.to(y_BHWC.dtype)
        # `to` is called only if the dtype changes: the compiler of torch 2.11 loses the gradient of a result that `to`
        # returns unchanged.
        if sums.dtype != x_BHWC.dtype:
            sums = sums.to(x_BHWC.dtype)
        outputs.append(sums)
    return tuple(outputs)


def _select_patch_rows(patches_BHWK: Tensor, grid: PatchGrid, kernel: int) -> Tensor:
    """Return a view of the rows of patches that a kernel of `kernel` x `kernel` cells reads.

    Args:
        patches_BHWK: all patches of the padded field.
        grid: the patch grid.
        kernel: edge of the kernel in cells.
    """
    first_row = grid.first_patch(kernel)
    num_rows = grid.output_shape[0] + kernel // grid.stride - 1
    return patches_BHWK[:, first_row : first_row + num_rows]


def to_row_weight(weight: Tensor, stride: int) -> Tensor:
    """Rearrange the weight of a convolution over cells into the weight of a convolution over rows of patches.

    Args:
        weight: (out, in, k, k).
        stride: edge of a patch in cells; a divisor of k.

    Returns:
        Weight (taps * out, stride^2 * in, taps, 1) with taps = k / stride. Output channels are ordered (column tap,
        out), input channels (row in the patch, column in the patch, in) as in `PatchGrid.unfold`.
    """
    out_channels, in_channels, kernel, _ = weight.shape
    taps = kernel // stride
    # out, in, row tap, row in the patch, column tap, column in the patch
    cells = weight.view(out_channels, in_channels, taps, stride, taps, stride)
    return cells.permute(4, 0, 3, 5, 1, 2).reshape(taps * out_channels, stride * stride * in_channels, taps, 1)


def from_row_weight(row_weight: Tensor, stride: int, shape: torch.Size) -> Tensor:
    """Rearrange the weight of a convolution over rows of patches into the weight of a convolution over cells.

    This function is the inverse of `to_row_weight`.

    Args:
        row_weight: (taps * out, stride^2 * in, taps, 1), result of `to_row_weight`.
        stride: edge of a patch in cells.
        shape: (out, in, k, k), the shape of the result.
    """
    out_channels, in_channels, kernel, _ = shape
    taps = kernel // stride
    # column tap, out, row in the patch, column in the patch, in, row tap
    cells = row_weight.view(taps, out_channels, stride, stride, in_channels, taps)
    return cells.permute(1, 4, 5, 2, 0, 3).reshape(shape)


def view_column_taps(y_BHWC: Tensor, taps: int, first_column: int, num_columns: int) -> Tensor:
    """Return the results of all column taps for each output column, as a diagonal view of `y_BHWC`.

    Args:
        y_BHWC: contiguous result of a convolution over rows, with channels ordered (column tap, out).
        taps: number of column taps.
        first_column: column of patches that the first tap of the first output column reads.
        num_columns: number of output columns.

    Returns:
        (B, H, num_columns, taps, out); tap t of column j is in column first_column + j + t of `y_BHWC`.
    """
    B, H, _, C = y_BHWC.shape
    out_channels = C // taps
    batch_stride, row_stride, column_stride, _ = y_BHWC.stride()
    # The next tap is in the next column, in the next group of `out_channels` channels.
    tap_stride = column_stride + out_channels
    return y_BHWC.as_strided(
        (B, H, num_columns, taps, out_channels),
        (batch_stride, row_stride, column_stride, tap_stride, 1),
        first_column * column_stride,
    )


def _compute_input_gradient(grad_y_BHWC: Tensor, rows_BHWK: Tensor, row_weight: Tensor) -> Tensor:
    """Return the gradient of `rows_BHWK` in a convolution over rows, with the same shape.

    Args:
        grad_y_BHWC: gradient of the result of the convolution.
        rows_BHWK: rows of patches that were convolved.
        row_weight: weight of the convolution.
    """
    # `output_mask` selects the gradient of the input; the gradients of weight and bias are not computed.
    grad_rows_BKHW, _, _ = torch.ops.aten.convolution_backward(
        grad_y_BHWC.permute(0, 3, 1, 2),
        rows_BHWK.permute(0, 3, 1, 2),
        row_weight,
        bias_sizes=None,
        stride=(1, 1),
        padding=(0, 0),
        dilation=(1, 1),
        transposed=False,
        output_padding=(0, 0),
        groups=1,
        output_mask=(True, False, False),
    )
    return grad_rows_BKHW.permute(0, 2, 3, 1).contiguous()


def _compute_weight_gradient(grad_y_BHWC: Tensor, rows_BHWK: Tensor, taps: int) -> Tensor:
    """Return the gradient of the weight of a convolution over rows, in float32 or a wider dtype.

    One matrix product computes each tap. This is faster than the weight gradient of a convolution in torch: twice as
    fast for 16 taps in float32 on a CPU (torch 2.13).

    Args:
        grad_y_BHWC: gradient of the result of the convolution.
        rows_BHWK: rows of patches that were convolved.
        taps: number of row taps.

    Returns:
        Gradient (C, K, taps, 1), with the C channels of `grad_y_BHWC` and the K channels of a patch.
    """
    num_rows = grad_y_BHWC.shape[1]
    # In bfloat16, each product would copy a transposed view, so the view is made contiguous once.
    grad_y_BCN = grad_y_BHWC.flatten(1, 2).transpose(1, 2).contiguous()
    sum_dtype = torch.promote_types(grad_y_BHWC.dtype, torch.float32)
    tap_gradients = []
    for tap in range(taps):
        # Tap t of output row i reads row i + t of the patches.
        tap_rows_BNK = rows_BHWK[:, tap : tap + num_rows].flatten(1, 2)
        tap_gradients.append((grad_y_BCN @ tap_rows_BNK).to(sum_dtype).sum(0))
    return torch.stack(tap_gradients, dim=-1).unsqueeze(-1)
