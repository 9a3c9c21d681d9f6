"""Up-sampling blocks of a convolutional decoder. Each block doubles height and width.

Input and output of all blocks are (B, C, H, W) tensors. The output is in channels-last memory if the input is.

Shape suffixes: B batch, C channels, H and W rows and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit.models.data_axes import mark_output_layer, mark_output_to_output_layer
from credit.models.initialise import kaiming_normal
from credit.models.kernels.merged_head import (
    NO_MARGINS,
    Margins,
    crop_input,
    is_merging_worthwhile,
    merge_kernels,
    merged_head,
)
from credit.models.layers.norm import NO_CONDITION_DIMS, NO_CONDITIONS, ConditionDims, Conditions, GroupNorm


def pixel_shuffle(x_BCHW: Tensor) -> Tensor:
    """Return the same values as `torch.nn.PixelShuffle(2)`, (B, C/4, 2H, 2W), in channels-last memory."""
    B, C, H, W = x_BCHW.shape
    # The channels are ordered (C / 4, row phase, column phase). Each old cell becomes 2 x 2 new cells; the phases, 0 or
    # 1, are the row and column of a new cell among the 2 x 2 cells.
    x_BHWC22 = x_BCHW.permute(0, 2, 3, 1).unflatten(-1, (C // 4, 2, 2))
    # (B, H, row phase, W, column phase, C / 4)
    x_BH2W2C = x_BHWC22.permute(0, 1, 4, 2, 5, 3)
    return x_BH2W2C.reshape(B, 2 * H, 2 * W, C // 4).permute(0, 3, 1, 2)


class SubpixelConv(nn.Conv2d):
    """3x3 convolution to 4 * `out_channels` channels, then a pixel shuffle (Shi et al. 2016, arXiv 1609.05158).

    Args:
        in_channels: input channels.
        out_channels: output channels.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, 4 * out_channels, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the up-sampled field, (B, out_channels, 2H, 2W)."""
        return pixel_shuffle(super().forward(x_BCHW))

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return the ICNR initial value of the weight or bias (Aitken et al. 2017, arXiv 1707.02937), on the CPU.

        The four sub-kernels of an output channel have equal initial values, so the output of an untrained network has
        no checkerboard pattern. The initial bias is zero.

        Args:
            name: ``"weight"`` or ``"bias"``.
            shape: shape of the complete (unsharded) tensor.
            generator: random generator on the CPU.
        """
        if name == "bias":
            return torch.zeros(shape, device="cpu")
        # Each output value depends on 3 x 3 values of each input channel.
        fan_in = shape[1] * 9
        sub_kernel = kaiming_normal((shape[0] // 4, *shape[1:]), fan_in, generator)
        return sub_kernel.repeat_interleave(4, dim=0)


class Refinement(nn.Sequential):
    """Residual branch that applies 3x3 convolution, group norm and SiLU twice. The caller adds the result to the input.

    Args:
        channels: input and output channels.
        groups: groups of the norm; divides `channels`.
        condition_dims: lengths of the conditions that the norms depend on.
    """

    def __init__(self, channels: int, groups: int, condition_dims: ConditionDims = NO_CONDITION_DIMS) -> None:
        layers: list[nn.Module] = []
        for _ in range(2):
            norm = GroupNorm(groups, channels, condition_dims)
            layers += [nn.Conv2d(channels, channels, 3, padding=1), norm, nn.SiLU()]
        super().__init__(*layers)

    def forward(self, x_BCHW: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the output of the branch (B, C, H, W), to be added to the input.

        Args:
            x_BCHW: field.
            conditions: vectors of each sample or cell, at the resolution of the field, on which the norms depend.
        """
        for layer in self:
            # Only the norms depend on conditions.
            if isinstance(layer, GroupNorm):
                x_BCHW = layer(x_BCHW, conditions)
            else:
                x_BCHW = layer(x_BCHW)
        return x_BCHW


class UpBlockPS(nn.Module):
    """Up-sampling by a pixel shuffle, followed by two residual branches: a 3x3 convolution, then a `Refinement`.

    Args:
        in_channels: input channels.
        out_channels: output channels.
        groups: groups of the norms; divides `out_channels`.
        condition_dims: lengths of the conditions that the norms depend on.
    """

    _fsdp2_shard = True

    def __init__(
        self, in_channels: int, out_channels: int, groups: int, condition_dims: ConditionDims = NO_CONDITION_DIMS
    ) -> None:
        super().__init__()
        self.up = SubpixelConv(in_channels, out_channels)
        self.sharp = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.refine = Refinement(out_channels, groups, condition_dims)

    def forward(self, x_BCHW: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the up-sampled field (B, out_channels, 2H, 2W).

        Args:
            x_BCHW: (B, in_channels, H, W) field.
            conditions: vectors of each sample or cell, at the resolution 2H x 2W, on which the norms depend.
        """
        x_BCHW = self.up(x_BCHW)
        x_BCHW = x_BCHW + self.sharp(x_BCHW)
        return x_BCHW + self.refine(x_BCHW, conditions)


class UpBlock(nn.Module):
    """Up-sampling by a transposed convolution, followed by a `Refinement` as a residual branch.

    Args:
        in_channels: input channels.
        out_channels: output channels.
        groups: groups of the norms; divides `out_channels`.
        condition_dims: lengths of the conditions that the norms depend on.
    """

    _fsdp2_shard = True

    def __init__(
        self, in_channels: int, out_channels: int, groups: int, condition_dims: ConditionDims = NO_CONDITION_DIMS
    ) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, out_channels, 2, stride=2)
        self.refine = Refinement(out_channels, groups, condition_dims)

    def forward(self, x_BCHW: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the up-sampled field (B, out_channels, 2H, 2W).

        Args:
            x_BCHW: (B, in_channels, H, W) field.
            conditions: vectors of each sample or cell, at the resolution 2H x 2W, on which the norms depend.
        """
        x_BCHW = self.up(x_BCHW)
        return x_BCHW + self.refine(x_BCHW, conditions)


class TransposedHead(nn.ConvTranspose2d):
    """Last block of a decoder: a transposed convolution. The margins of its output, such as the padding, are cropped.

    Args:
        in_channels: input channels.
        out_channels: output channels.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 4, stride=2, padding=1)

    def mark_channels(self, frames: int) -> None:
        """Declare that the block writes the output channels.

        Args:
            frames: number of output frames.
        """
        mark_output_layer(self, frames)

    def forward(self, x_BCHW: Tensor, margins: Margins = NO_MARGINS) -> Tensor:
        """Return the up-sampled field (B, out_channels, 2H, 2W) without the margins.

        Args:
            x_BCHW: (B, in_channels, H, W) input.
            margins: numbers of output rows at (north, south) and columns at (west, east) to crop.
        """
        x_BCHW, rows, columns = crop_input(x_BCHW, margins)
        return super().forward(x_BCHW)[..., rows, columns]


class SubpixelHead(nn.Sequential):
    """Last block of a decoder: a subpixel convolution and a 3x3 convolution. The margins of the output are cropped.

    The two convolutions have no activation between them, so together they are a single linear map. The block computes
    this map as one merged convolution if this takes fewer operations, see `credit.models.kernels.merged_head`.

    Attributes:
        merged_weight: weight of the merged convolution, for inference; None until `precompute` is called.
        merged_bias: bias of the merged convolution, for inference; None until `precompute` is called.

    Args:
        in_channels: input channels.
        out_channels: output channels.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(SubpixelConv(in_channels, out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1))
        self.register_buffer("merged_weight", None, persistent=False)
        self.register_buffer("merged_bias", None, persistent=False)

    def mark_channels(self, frames: int) -> None:
        """Declare that the block writes the output channels.

        Args:
            frames: number of output frames.
        """
        # Before the pixel shuffle, the four phases of a channel are neighbouring channels.
        mark_output_layer(self[0], frames, inner=4)
        mark_output_to_output_layer(self[1], frames)

    def forward(self, x_BCHW: Tensor, margins: Margins = NO_MARGINS) -> Tensor:
        """Return the up-sampled field (B, out_channels, 2H, 2W) without the margins.

        Args:
            x_BCHW: (B, in_channels, H, W) input.
            margins: numbers of output rows at (north, south) and columns at (west, east) to crop.
        """
        if is_merging_worthwhile(x_BCHW, margins, self[1].out_channels):
            weight, bias = self.merged_weight, self.merged_bias
            # In training the weights change, so the kernels are merged in each call.
            if weight is None:
                weight, bias = self._merge_kernels()
            return merged_head(x_BCHW, weight, bias, margins)
        x_BCHW, rows, columns = crop_input(x_BCHW, margins)
        return super().forward(x_BCHW)[..., rows, columns]

    @torch.no_grad()
    def precompute(self) -> None:
        """Compute and cache the merged convolution for inference. After this call, the weights must not change."""
        self.merged_weight, self.merged_bias = self._merge_kernels()

    def _merge_kernels(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the merged convolution, see `merge_kernels`."""
        subpixel_conv, conv = self
        return merge_kernels(subpixel_conv.weight, subpixel_conv.bias, conv.weight, conv.bias)
