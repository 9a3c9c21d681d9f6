"""Group norm of a field that is divided among ranks. The norm uses the mean and the variance of the whole field.

Shape suffixes: B batch, C channels, G groups, H and W rows and columns, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.parallel.tensor.collectives import sum_over_ranks


@dataclass(frozen=True)
class CellCounts:
    """Ranks that share a field, and the number of cells of each rank.

    Attributes:
        group: ranks that share the field.
        counts: number of cells that belong to each rank. A rank with 0 cells computes copies of other ranks' cells;
            these copies are ignored in mean and variance.
        rank: index of this rank in the group.
    """

    group: dist.ProcessGroup
    counts: tuple[int, ...]
    rank: int

    @property
    def owns_cells(self) -> bool:
        """True if at least one cell belongs to this rank."""
        return self.counts[self.rank] > 0


def normalise_part(
    x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, num_groups: int, eps: float, cells: CellCounts
) -> Tensor:
    """Collective: return this rank's part (B, C, H, W) of a field after group norm.

    The backward pass is also a collective. The norm is computed in float32, or in float64 for a float64 field. The
    result has the dtype of the field.

    Args:
        x_BCHW: this rank's part of the field.
        weight_C: scale of each channel.
        bias_C: shift of each channel.
        num_groups: number of groups of channels.
        eps: constant that is added to the variance.
        cells: ranks that share the field, and their numbers of cells.
    """
    return _NormalisePart.apply(x_BCHW, weight_C, bias_C, num_groups, eps, cells)


class _NormalisePart(torch.autograd.Function):
    """Autograd function of `normalise_part`; it saves the field, the mean and the inverse standard deviation."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x_BCHW: Tensor,
        weight_C: Tensor,
        bias_C: Tensor,
        num_groups: int,
        eps: float,
        cells: CellCounts,
    ) -> Tensor:
        dtype = torch.promote_types(x_BCHW.dtype, torch.float32)
        mean_BG, variance_BG = _compute_moments(x_BCHW.to(dtype), num_groups, cells)
        inverse_std_BG = torch.rsqrt(variance_BG + eps)
        ctx.save_for_backward(x_BCHW, weight_C, mean_BG, inverse_std_BG)
        ctx.cells = cells
        # (x - mean) / std * weight + bias as one product and one sum.
        scale_BC = _repeat_for_channels(inverse_std_BG, weight_C) * weight_C.to(dtype)
        shift_BC = bias_C.to(dtype) - _repeat_for_channels(mean_BG, weight_C) * scale_BC
        return torch.addcmul(_reshape_to_field(shift_BC), x_BCHW.to(dtype), _reshape_to_field(scale_BC)).to(
            x_BCHW.dtype
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient_BCHW: Tensor) -> tuple[Tensor | None, ...]:
        x_BCHW, weight_C, mean_BG, inverse_std_BG = ctx.saved_tensors
        cells: CellCounts = ctx.cells
        dtype = mean_BG.dtype
        field_dtype = x_BCHW.dtype
        num_groups = mean_BG.shape[1]
        x_BCHW = x_BCHW.to(dtype)
        gradient_BCHW = gradient_BCHW.to(dtype)
        mean_BC = _repeat_for_channels(mean_BG, weight_C)
        inverse_std_BC = _repeat_for_channels(inverse_std_BG, weight_C)

        # The gradient of the bias is the sum of the output's gradient. The gradient of the weight is the sum of the
        # product of this gradient and the normalised field.
        grad_bias_BC = gradient_BCHW.sum((2, 3))
        products_BC = (gradient_BCHW * x_BCHW).sum((2, 3))
        grad_weight_BC = inverse_std_BC * (products_BC - mean_BC * grad_bias_BC)

        # Mean and variance depend on the cells of all ranks, so these two sums are over the whole field.
        sums_2BC = torch.stack([grad_bias_BC, grad_weight_BC]) * weight_C.to(dtype)
        sums_2BG = sum_over_ranks(_sum_groups(sums_2BC, num_groups), cells.group)
        if not cells.owns_cells:
            # Copies of cells are ignored in mean and variance, so they get no gradient from them.
            sums_2BG = torch.zeros_like(sums_2BG)
        num_values = sum(cells.counts) * weight_C.shape[0] // num_groups
        # Two contributions to the gradient of each cell in a group: through the mean, and through the variance. The
        # second contribution is multiplied by the normalised value of the cell.
        through_mean_BG, through_variance_BG = -inverse_std_BG * sums_2BG / num_values
        # The gradient of the field is scale * gradient + factor * x + constant.
        factor_BG = inverse_std_BG * through_variance_BG
        constant_BG = through_mean_BG - mean_BG * factor_BG
        scale_BC = inverse_std_BC * weight_C.to(dtype)
        grad_x_BCHW = torch.addcmul(
            _reshape_to_field(_repeat_for_channels(constant_BG, weight_C)),
            x_BCHW,
            _reshape_to_field(_repeat_for_channels(factor_BG, weight_C)),
        )
        grad_x_BCHW = grad_x_BCHW.addcmul_(gradient_BCHW, _reshape_to_field(scale_BC)).to(field_dtype)
        grad_weight_C = grad_weight_BC.sum(0).to(weight_C.dtype)
        return grad_x_BCHW, grad_weight_C, grad_bias_BC.sum(0).to(weight_C.dtype), None, None, None


def _compute_moments(x_BCHW: Tensor, num_groups: int, cells: CellCounts) -> tuple[Tensor, Tensor]:
    """Collective: return the mean and the variance (B, G) of each group of channels over the whole field.

    Each rank computes the mean and the variance of its part. A single sum over the ranks combines these moments without
    cancellation (Chan et al. 1983, The American Statistician 37(3)).
    """
    B, C, H, W = x_BCHW.shape
    values_per_cell = C // num_groups
    # A rank with copies of cells also computes its mean and squares, but does not add them to the sum over the ranks.
    num_values = H * W * values_per_cell
    mean_BG = _sum_groups(x_BCHW.sum((2, 3)), num_groups) / num_values
    mean_BC = mean_BG.repeat_interleave(values_per_cell, dim=1)
    squares_BC = (x_BCHW - _reshape_to_field(mean_BC)).square_().sum((2, 3))
    num_ranks = len(cells.counts)
    parts_R2BG = x_BCHW.new_zeros(num_ranks, 2, B, num_groups)
    if cells.owns_cells:
        parts_R2BG[cells.rank] = torch.stack([mean_BG, _sum_groups(squares_BC, num_groups)])
    means_RBG, squares_RBG = sum_over_ranks(parts_R2BG, cells.group).unbind(1)
    counts_R11 = torch.tensor(cells.counts, dtype=x_BCHW.dtype, device=x_BCHW.device).view(-1, 1, 1) * values_per_cell
    total = counts_R11.sum()
    mean_BG = (counts_R11 * means_RBG).sum(0) / total
    variance_BG = (squares_RBG + counts_R11 * (means_RBG - mean_BG).square()).sum(0) / total
    return mean_BG, variance_BG


def _sum_groups(x: Tensor, num_groups: int) -> Tensor:
    """Sum values (..., C) over the channels of each group, and return the sums (..., G)."""
    return x.unflatten(-1, (num_groups, -1)).sum(-1)


def _repeat_for_channels(x_BG: Tensor, weight_C: Tensor) -> Tensor:
    """Repeat the value of each group (B, G) for all channels of the group, and return the values (B, C)."""
    return x_BG.repeat_interleave(len(weight_C) // x_BG.shape[1], dim=1)


def _reshape_to_field(x_BC: Tensor) -> Tensor:
    """Reshape values of channels (B, C) to (B, C, 1, 1), which broadcasts to fields."""
    return x_BC[:, :, None, None]
