"""Bilinear interpolation of a field to another number of rows and columns.

Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Taps:
    """The two input cells along one axis between which each output cell is interpolated.

    Attributes:
        first: indices of the first cell of each output cell.
        second: indices of the second cell.
        weight: weight of the second cell; the first cell has the weight 1 - weight.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    weight: tuple[float, ...]

    def inputs(self) -> range:
        """Return the range from the first to the last input cell of the interpolation."""
        return range(min(self.first), max(self.second) + 1)

    def apply(self, x: Tensor, dim: int, first_input: int) -> Tensor:
        """Return `x` interpolated along one dimension, with the dtype of `x`.

        The interpolation is computed in at least float32, as torch does.

        Args:
            x: field of any shape.
            dim: dimension of the input cells.
            first_input: number, along the whole axis, of the first input cell in `x`.
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


def find_taps(outputs: range, input_size: int, output_size: int) -> Taps:
    """Return the input cells and weights with which `torch.nn.functional.interpolate` computes some output cells.

    All cells together cover the same interval before and after the interpolation (``align_corners=False``).

    Args:
        outputs: range of output cells.
        input_size: number of input cells along the whole axis.
        output_size: number of output cells along the whole axis.
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
    return Taps(tuple(first), tuple(second), tuple(weight))


class BilinearResize(nn.Module):
    """Bilinear interpolation of a field (B, C, H, W).

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
