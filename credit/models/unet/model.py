"""U-Net on a global latitude-longitude grid: a convolutional encoder and decoder with skip connections.

The architecture follows U-Cast (Rühling Cachay et al. 2026, arXiv 2604.09041), which uses the ADM network of Dhariwal
and Nichol 2021 (arXiv 2105.05233). In addition, convolutions read cells across the poles, and latitude is an input.

Shape suffixes: B batch, C channels, T time frames, H and W latitude rows and longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.base import ForecastModel, ModelSpec
from credit.models.data_axes import mark_input_layer, mark_output_layer
from credit.models.layers.norm import NO_CONDITION_DIMS, ConditionDims, Conditions, GroupNorm
from credit.models.layers.padding import SpherePadding
from credit.models.layers.sphere_conv import SphereConv2d
from credit.models.noise.noise_embedding import NoiseFieldEmbedding
from credit.models.noise.noise_input import (
    NOISE_KINDS,
    NoiseInput,
    add_dropout_noise,
    build_condition_dims,
    count_noise_channels,
)
from credit.models.registry import register_model
from credit.models.unet.blocks import BlockOptions, DownSampling, ResidualBlock, UpSampling, choose_num_groups
from credit.models.unet.checks import check_grid, check_section
from credit.models.unet.latitude import LatitudeProjection
from credit.models.unet.levels import Level, find_levels
from credit.models.unet.section import UNetSection
from credit.parallel.domain.division import FieldPart
from credit.parallel.domain.split import DomainPlan

# Factor on the initial values of the last convolution. With this factor, the initial output has a standard deviation of
# a few hundredths. With `model.residual: true`, the first loss is then close to the loss of persistence.
INITIAL_OUTPUT_SCALE = 0.1


class EncoderLevel(nn.Module):
    """Level of the encoder: down-sampling from the next finer level, then residual blocks.

    Args:
        down: down-sampling; None at the finest level.
        blocks: residual blocks.
    """

    def __init__(self, down: DownSampling | None, blocks: list[ResidualBlock]) -> None:
        super().__init__()
        self.down = down
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x_BCHW: Tensor, conditions: Conditions) -> list[Tensor]:
        """Return the output of the down-sampling (if any) and of each block, all with the level's shape (B, C, H, W).

        Args:
            x_BCHW: output of the next finer level; at the finest level, output of the first convolution.
            conditions: noise at the resolution of this level.
        """
        outputs = []
        if self.down is not None:
            x_BCHW = self.down(x_BCHW)
            outputs.append(x_BCHW)
        for block in self.blocks:
            x_BCHW = block(x_BCHW, None, conditions)
            outputs.append(x_BCHW)
        return outputs


class DecoderLevel(nn.Module):
    """Level of the decoder: up-sampling from the next coarser level, then residual blocks with skip connections.

    Args:
        up: up-sampling; None at the coarsest level.
        blocks: residual blocks, one for each skip connection.
    """

    def __init__(self, up: UpSampling | None, blocks: list[ResidualBlock]) -> None:
        super().__init__()
        self.up = up
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x_BCHW: Tensor, skips: list[Tensor], conditions: Conditions) -> Tensor:
        """Return the output of the last block, with the level's shape (B, C, H, W).

        Args:
            x_BCHW: output of the next coarser level; at the coarsest level, output of the middle blocks.
            skips: outputs of the encoder at this level, in the order of their computation. The first block reads the
                last output.
            conditions: noise at the resolution of this level.
        """
        if self.up is not None:
            height, width = skips[0].shape[2:]
            x_BCHW = self.up(x_BCHW, (height, width))
        for block, skip_BCHW in zip(self.blocks, reversed(skips), strict=True):
            x_BCHW = block(x_BCHW, skip_BCHW, conditions)
        return x_BCHW


class OutputHead(nn.Module):
    """Group norm, SiLU and 3x3 convolution to the output channels, with small initial values.

    Args:
        channels: channels of the input.
        out_channels: channels of the output.
        level: the finest level.
        condition_dims: lengths of the conditions that the norm depends on.
    """

    def __init__(
        self, channels: int, out_channels: int, level: Level, condition_dims: ConditionDims = NO_CONDITION_DIMS
    ) -> None:
        super().__init__()
        self.norm = GroupNorm(choose_num_groups(channels), channels, condition_dims)
        self.conv = SphereConv2d(channels, out_channels, skip=level.pole_skip, initial_scale=INITIAL_OUTPUT_SCALE)

    def forward(self, x_BCHW: Tensor, conditions: Conditions) -> Tensor:
        """Return the output channels of the network, (B, out_channels, H, W).

        Args:
            x_BCHW: output of the decoder.
            conditions: noise on which the norm depends.
        """
        return self.conv(F.silu(self.norm(x_BCHW, conditions)))


@register_model("unet", UNetSection)
class UNet(ForecastModel):
    """Convolutional U-Net on the sphere, with attention at its coarsest levels.

    Args:
        spec: channels, grid and frames of the data.
        section: sizes and options, described in `UNetSection`.

    Attributes:
        levels: rows, columns and poles of each level, the finest level first.
        encoder: levels of the encoder, the finest level first.
        middle: two residual blocks at the coarsest level; only the first may have attention.
        decoder: levels of the decoder, the coarsest level first.

    Raises:
        ConfigError: if sizes in the section contradict each other, or the grid cannot be halved often enough.
    """

    output_is_new = True
    casts_weights = True
    conditions = NOISE_KINDS

    def __init__(self, spec: ModelSpec, section: UNetSection) -> None:
        super().__init__(spec, section)
        dim = section.dim
        check_section(section)
        check_grid(spec.grid.shape, len(dim))
        self.levels = find_levels(spec.grid, len(dim))
        condition_dims = build_condition_dims(section)
        self.noise = _build_noise_input(section, self.levels)

        # Layers of the input.
        self.stem = SphereConv2d(
            spec.in_channels * spec.input_frames,
            dim[0],
            skip=self.levels[0].pole_skip,
            vector_channels=spec.vector_inputs,
        )
        mark_input_layer(self.stem, spec.input_frames)
        self.latitude = LatitudeProjection(spec.grid.lat, dim[0])
        field_channels = count_noise_channels(section, "spherical")
        self.noise_embed = NoiseFieldEmbedding(field_channels, dim[0], stride=1) if field_channels else None

        # The blocks of each level share their options; only the coarsest levels have attention.
        first_with_attention = len(dim) - section.attention_levels
        options = []
        for number, level in enumerate(self.levels):
            dim_head = section.dim_head if number >= first_with_attention else None
            options.append(BlockOptions(level, dim_head, section.ff_dropout, condition_dims))
        self.encoder = nn.ModuleList()
        self.decoder = nn.ModuleList()
        for number, (width, depth) in enumerate(zip(dim, section.depth, strict=True)):
            down = DownSampling(dim[number - 1], width, self.levels[number - 1]) if number else None
            blocks = [ResidualBlock(width, width, options[number]) for _ in range(depth)]
            self.encoder.append(EncoderLevel(down, blocks))
            # The encoder has one more output than blocks: the output of the down-sampling or of the first convolution.
            is_coarsest = number == len(dim) - 1
            up = None if is_coarsest else UpSampling(dim[number + 1], width, self.levels[number])
            blocks = [ResidualBlock(2 * width, width, options[number]) for _ in range(depth + 1)]
            self.decoder.insert(0, DecoderLevel(up, blocks))
        without_attention = BlockOptions(self.levels[-1], None, section.ff_dropout, condition_dims)
        self.middle = nn.ModuleList(
            ResidualBlock(dim[-1], dim[-1], block_options) for block_options in (options[-1], without_attention)
        )
        out_channels = spec.out_channels * spec.output_frames
        self.head = OutputHead(dim[0], out_channels, self.levels[0], condition_dims)
        mark_output_layer(self.head.conv, spec.output_frames)
        add_dropout_noise(self, section, feed_forward_rate=section.ff_dropout)
        self.initialise_unless_meta()

    def forward(self, x_BCTHW: Tensor, condition: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the normalised output; see `ForecastModel.forward` for arguments, shapes and errors."""
        x_BCHW = self.flatten_frames(x_BCTHW)
        level_conditions = self.noise(condition, x_BCHW.dtype)
        noise_BKHW = self.noise.pad_fields(condition, x_BCHW.dtype)
        x_BCHW = self.stem(x_BCHW) + self.latitude()
        if noise_BKHW is not None:
            x_BCHW = x_BCHW + self.noise_embed(noise_BKHW)

        # Outputs of the encoder at each level, which the decoder reads.
        skips_by_level = []
        for number, (level, conditions) in enumerate(zip(self.encoder, level_conditions, strict=True)):
            outputs = level(x_BCHW, conditions)
            skips_by_level.append(outputs if number else [x_BCHW, *outputs])
            x_BCHW = skips_by_level[-1][-1]
        for block in self.middle:
            x_BCHW = block(x_BCHW, None, level_conditions[-1])
        # The decoder begins at the coarsest level.
        for level, conditions in zip(self.decoder, reversed(level_conditions), strict=True):
            x_BCHW = level(x_BCHW, skips_by_level.pop(), conditions)
        y_BCHW = self.head(x_BCHW, level_conditions[0])
        return y_BCHW.unflatten(1, self.spec.out_shape[:2]).contiguous()

    def plan_domain(self, num_parts: tuple[int, int]) -> DomainPlan:
        """Return the divisions and rules for domain parallelism with M x N parts of the grid.

        Args:
            num_parts: (M, N) numbers of parts of the latitude rows and of the longitude columns.

        Raises:
            ConfigError: if the grid cannot be divided in this way.
        """
        from credit.models.unet.domain import plan_unet

        return plan_unet(self, num_parts)


def _build_noise_input(section: UNetSection, levels: list[Level]) -> NoiseInput:
    """Return the layer that averages noise to the resolution of each level.

    From each level to the next, noise is averaged over 2 x 2 cells. For L levels, the number of rows must therefore be
    a multiple of 2^(L - 1). The layer adds rows beyond the south pole until this is the case, and crops them at each
    level.

    Args:
        section: the config section of the model.
        levels: the levels of the network.
    """
    multiple = 2 ** (len(levels) - 1)
    rows_beyond_pole = -levels[0].shape[0] % multiple
    padding = SpherePadding("earth", lat=(0, rows_beyond_pole), skip=levels[0].pole_skip)
    strides = [1] + [2] * (len(levels) - 1)
    noise = NoiseInput(section, padding, strides)
    noise.stage_parts = [FieldPart(range(level.shape[0]), range(level.shape[1])) for level in levels]
    return noise
