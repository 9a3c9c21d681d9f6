"""Convolution of fields on a global latitude-longitude grid, with cells across the poles and around the globe.

Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit.models.kernels.autocast import autocast_dtype
from credit.models.layers.padding import SpherePadding


class SphereConv2d(nn.Conv2d):
    """Convolution with a square kernel that reads cells across the poles and around the globe (`SpherePadding`).

    With stride 2, the output has the rows and columns 0, 2, 4, ... of the input, so half as many rows and columns,
    rounded up.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel: edge of the kernel in cells, odd.
        stride: 1 or 2.
        skip: number of rows at the (north, south) pole that are not copied beyond the pole, see `SpherePadding`.
        vector_channels: indices of the input channels whose sign changes beyond a pole.
        initial_scale: factor on the initial values of weight and bias. With a small factor in the last layer, the
            output of a network is close to zero at the start of training.

    Attributes:
        sphere_padding: padding of the input.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int = 3,
        stride: int = 1,
        *,
        skip: tuple[int, int] = (0, 0),
        vector_channels: tuple[int, ...] = (),
        initial_scale: float = 1.0,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel, stride=stride)
        # The kernel is centred on the cell that it computes.
        pads = (kernel // 2, kernel // 2)
        self.sphere_padding = SpherePadding("earth", pads, pads, skip, vector_channels)
        self.initial_scale = initial_scale

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the convolved field (B, out_channels, H / stride, W / stride); these sizes are rounded up."""
        # Padding copies the field, so under autocast the field is cast before it is padded.
        x_BCHW = x_BCHW.to(autocast_dtype(x_BCHW) or x_BCHW.dtype)
        return super().forward(self.sphere_padding.pad(x_BCHW))

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return an initial value on the CPU: uniform numbers in +-`initial_scale` / sqrt(inputs per output).

        Args:
            key: ``"weight"`` or ``"bias"``.
            shape: shape of the complete (unsharded) tensor.
            generator: random generator on the CPU.
        """
        inputs_per_output = self.in_channels * self.kernel_size[0] * self.kernel_size[1]
        bound = self.initial_scale * inputs_per_output**-0.5
        return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)
