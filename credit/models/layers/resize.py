"""Bilinear interpolation of a field to a different number of rows and columns.

Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class AxisInterpolation:
    """Input cells and weights of a linear interpolation along one axis: two input cells for each output cell.

    Attributes:
        first: for each output cell, the index of the first of its two input cells.
        second: for each output cell, the index of the second of its two input cells.
        weight: for each output cell, the weight of the second input cell; the first has the weight 1 - weight.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    weight: tuple[float, ...]

    def input_range(self) -> range:
        """Return the range of input cells that the interpolation reads."""
        return range(min(self.first), max(self.second) + 1)

    def apply(self, x: Tensor, dim: int, first_input: int) -> Tensor:
        """Return `x` interpolated along one dimension, with the dtype of `x`.

        Like the interpolation of torch, the computation is in float32 or a wider dtype.

        Args:
            x: field of any shape.
            dim: dimension of the input cells.
            first_input: index, along the complete axis, of the first input cell in `x`.
        """
        first = torch.tensor(self.first, device=x.device) - first_input
        second = torch.tensor(self.second, device=x.device) - first_input
        shape = [1] * x.dim()
        shape[dim] = len(self.weight)
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = torch.tensor(self.weight, dtype=dtype, device=x.device).view(shape)
        first_values = x.index_select(dim, first).to(dtype)
        second_values = x.index_select(dim, second).to(dtype)
        return torch.lerp(first_values, second_values, weight).to(x.dtype)


def find_interpolation(outputs: range, input_size: int, output_size: int) -> AxisInterpolation:
    """Return the input cells and weights from which `torch.nn.functional.interpolate` computes the cells in `outputs`.

    The input cells and the output cells of the axis cover the same interval (``align_corners=False``).

    Args:
        outputs: range of output cells.
        input_size: number of input cells along the complete axis.
        output_size: number of output cells along the complete axis.
    """
    first = []
    weight = []
    for output in outputs:
        # Distance of the centre of the output cell from the centre of the first input cell, in input cells.
        position = max((output + 0.5) * input_size / output_size - 0.5, 0.0)
        cell = min(int(position), input_size - 1)
        first.append(cell)
        weight.append(position - cell)
    second = [min(cell + 1, input_size - 1) for cell in first]
    return AxisInterpolation(tuple(first), tuple(second), tuple(weight))


class BilinearResize(nn.Module):
    """Layer that interpolates a field (B, C, H, W) bilinearly to a given number of rows and columns.

    Args:
        shape: number of rows and columns of the result.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the field interpolated to (B, C, *shape); a field that has this shape is returned unchanged."""
        if tuple(x_BCHW.shape[-2:]) == self.shape:
            return x_BCHW
        return F.interpolate(x_BCHW, size=self.shape, mode="bilinear", align_corners=False)
