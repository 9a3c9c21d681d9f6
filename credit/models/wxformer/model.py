"""WXFormer: a CrossFormer encoder and a convolutional U-Net decoder on a global latitude-longitude grid.

CrossFormer: Wang et al. 2021, arXiv 2108.00154. WXFormer: Schreck et al. 2025, npj Clim. Atmos. Sci. 8:239.
`WXFormer.from_kwargs` without options builds the network of the published weights.

Shape suffixes: B batch, C channels, T time frames, H and W latitude rows and longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from credit.config.sections.model import ModelSection
from credit.models.base import ForecastModel, ModelSpec
from credit.models.checks import parse_keyword_arguments
from credit.models.data_axes import mark_input_layer
from credit.models.kernels.merged_head import NO_MARGINS, Margins
from credit.models.layers.cross_scale_embedding import CrossScaleEmbedding
from credit.models.layers.norm import NO_CONDITION_DIMS, NO_CONDITIONS, ConditionDims, Conditions
from credit.models.layers.padding import NO_PADDING, SpherePadding, window_multiple
from credit.models.layers.resize import BilinearResize
from credit.models.layers.spectral_norm import apply_spectral_norm
from credit.models.layers.transformer_layer import TransformerLayer
from credit.models.layers.up_sampling import SubpixelHead, TransposedHead, UpBlock, UpBlockPS
from credit.models.noise.noise_embedding import NoiseFieldEmbedding
from credit.models.noise.noise_input import (
    NOISE_KINDS,
    NoiseInput,
    add_dropout_noise,
    build_condition_dims,
    count_noise_channels,
)
from credit.models.padding.build import build_padding
from credit.models.registry import register_model
from credit.models.wxformer.checks import (
    check_output_size,
    check_section,
    check_windows,
    find_output_shape,
)
from credit.models.wxformer.section import WXFormerSection
from credit.parallel.domain.split import DomainPlan

NUM_STAGES = 4
# Settings of the published weights that differ from the section's defaults.
PUBLISHED_SETTINGS: dict[str, Any] = {
    "dim": [128, 256, 512, 1024],
    "depth": [2, 2, 8, 2],
    "global_window_size": [10, 5, 2, 1],
    "local_window_size": 10,
    "decoder": "transposed",
    "padding": None,
}


class EncoderStage(nn.Module):
    """Encoder stage: cross-scale embedding, which reduces the resolution, followed by transformer layers.

    Args:
        embed: cross-scale embedding; its output has the channels of the stage.
        layers: transformer layers with the same number of channels.
        noise_embed: embedding of fields of noise; None for a stage without such fields.
    """

    def __init__(
        self,
        embed: CrossScaleEmbedding,
        layers: Sequence[TransformerLayer],
        noise_embed: NoiseFieldEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(layers)
        self.noise_embed = noise_embed

    def forward(
        self, x_BCHW: Tensor, conditions: Conditions = NO_CONDITIONS, noise_BKHW: Tensor | None = None
    ) -> Tensor:
        """Return the output of the stage.

        Args:
            x_BCHW: output of the previous stage, (B, channels of that stage, H, W), or input of the network.
            conditions: noise on which the layers depend, at the resolution of this stage.
            noise_BKHW: (B, K fields, H, W) padded fields of noise; `noise_embed` maps them to tokens, which are added
                to the embedding. None for a stage without fields of noise.

        Returns:
            (B, channels of this stage, H / stride, W / stride) in channels-last memory, where H and W include the
            padding that the embedding adds.
        """
        x_BHWC = self.embed(x_BCHW)
        if noise_BKHW is not None:
            x_BHWC = x_BHWC + self.noise_embed(noise_BKHW).permute(0, 2, 3, 1)
        for layer in self.layers:
            x_BHWC = layer(x_BHWC, conditions)
        return x_BHWC.permute(0, 3, 1, 2)


class Decoder(nn.Module):
    """Decoder from the outputs of the four encoder stages to the padded output field.

    Args:
        kind: kind of up-sampling, `pixel_shuffle` or `transposed`.
        dim: number of channels of each of the four encoder stages; each stage has twice as many as the previous stage.
        out_channels: number of output channels times number of output frames.
        condition_dims: lengths of the noise vectors on which the norms depend.
    """

    def __init__(
        self,
        kind: str,
        dim: tuple[int, ...],
        out_channels: int,
        condition_dims: ConditionDims = NO_CONDITION_DIMS,
    ) -> None:
        super().__init__()
        if kind == "pixel_shuffle":
            block, head = UpBlockPS, SubpixelHead
        else:
            block, head = UpBlock, TransposedHead
        # The group norms of all blocks have as many groups as the first stage has channels.
        groups = dim[0]
        # The first block reads the coarsest stage. The other blocks and the head read the output of the previous block
        # and a skip connection with the same number of channels.
        self.blocks = nn.ModuleList(
            [
                block(dim[3], dim[2], groups, condition_dims),
                block(2 * dim[2], dim[1], groups, condition_dims),
                block(2 * dim[1], dim[0], groups, condition_dims),
            ]
        )
        self.head = head(2 * dim[0], out_channels)

    def forward(
        self, stage_outputs: list[Tensor], stage_conditions: list[Conditions], margins: Margins = NO_MARGINS
    ) -> Tensor:
        """Return the output field.

        Args:
            stage_outputs: (B, dim[i], H / 2^i, W / 2^i) for each of the four stages, where H and W are the size of the
                first stage.
            stage_conditions: noise on which the blocks depend, at the resolution of each of the four stages.
            margins: output rows (north, south) and columns (west, east) to crop. The head does not compute the cropped
                cells, which saves time because the head has most of the cells of the decoder.

        Returns:
            (B, out_channels, 2H, 2W) without the margins.
        """
        *skips, x_BCHW = stage_outputs
        # The output of a block has the resolution of its skip connection, so the block uses the conditions of that
        # stage.
        conditions_of_skips = reversed(stage_conditions[:-1])
        for block, skip_BCHW, conditions in zip(self.blocks, reversed(skips), conditions_of_skips, strict=True):
            x_BCHW = torch.cat((block(x_BCHW, conditions), skip_BCHW), dim=1)
        return self.head(x_BCHW, margins)


def _build_grid_padding(spec: ModelSpec, section: WXFormerSection, windows: Sequence[tuple[int, int]]) -> SpherePadding:
    """Return the padding that ``model.padding`` describes; raise ConfigError if windows or the decoder do not fit it.

    Args:
        spec: channels, grid and frames of the data.
        section: the config section of the model.
        windows: (global, local) window edges of each stage, in cells.

    Raises:
        ConfigError: if a window does not divide the padded size of its stage, or the size of the decoder output differs
            from the grid and ``model.interp`` is false.
    """
    height, width = spec.grid.shape
    strides = section.cross_embed_strides
    padding_section = None
    if section.padding is not None:
        padding_section = section.padding.model_dump()
    padding = build_padding(
        padding_section,
        grid=(height, width),
        strides=strides,
        multiple=window_multiple(strides, windows),
        vector_channels=spec.vector_inputs,
        pole_points=spec.grid.has_pole_points,
    )
    check_windows("lat", height, padding.lat, strides, windows)
    check_windows("lon", width, padding.lon, strides, windows)
    check_output_size((height, width), padding, strides, section.interp)
    return padding


@register_model("wxformer", WXFormerSection)
class WXFormer(ForecastModel):
    """WXFormer: four encoder stages with window attention, and a convolutional decoder with skip connections.

    Args:
        spec: channels, grid and frames of the data.
        section: sizes and options, described in `WXFormerSection`.

    Attributes:
        padding: cells that are added around the grid before the first stage.
        stages: the four encoder stages.
        decoder: decoder from the outputs of all stages to the output field.

    Raises:
        ConfigError: if sizes in the section contradict each other, or windows do not fit the padded grid.
    """

    output_is_new = True
    casts_weights = True
    conditions = NOISE_KINDS

    def __init__(self, spec: ModelSpec, section: WXFormerSection) -> None:
        super().__init__(spec, section)
        # Check the sizes that do not depend on the data.
        dim = section.dim
        strides = section.cross_embed_strides
        local_windows = section.local_window_size
        if isinstance(local_windows, int):
            local_windows = [local_windows] * NUM_STAGES
        check_section(section, local_windows, NUM_STAGES)

        # The padding makes every window divide the size of its stage.
        windows = list(zip(section.global_window_size, local_windows, strict=True))
        self.padding = _build_grid_padding(spec, section, windows)

        # Layers of the encoder. Only the first embedding pads the field.
        self.noise = NoiseInput(section, self.padding, strides)
        condition_dims = build_condition_dims(section)
        in_widths = (spec.in_channels * spec.input_frames, *dim)
        self.stages = nn.ModuleList()
        for stage in range(NUM_STAGES):
            stage_padding = self.padding if stage == 0 else NO_PADDING
            kernel_sizes = tuple(section.cross_embed_kernel_sizes[stage])
            embed = CrossScaleEmbedding(in_widths[stage], dim[stage], kernel_sizes, strides[stage], stage_padding)
            if stage == 0:
                for conv in embed.convs:
                    mark_input_layer(conv, spec.input_frames)
            layers = []
            for _ in range(section.depth[stage]):
                layer = TransformerLayer(
                    dim[stage],
                    section.dim_head,
                    local_window=local_windows[stage],
                    global_window=section.global_window_size[stage],
                    attn_dropout=section.attn_dropout,
                    ff_dropout=section.ff_dropout,
                    bias_index=section.position_bias_index,
                    condition_dims=condition_dims,
                )
                layers.append(layer)
            # Fields of `spherical` noise are an additional input of the first stage.
            noise_embed = None
            field_channels = count_noise_channels(section, "spherical")
            if stage == 0 and field_channels:
                noise_embed = NoiseFieldEmbedding(field_channels, dim[0], strides[0])
            self.stages.append(EncoderStage(embed, layers, noise_embed))

        self.decoder_output_shape = find_output_shape(spec.grid.shape, self.padding, strides)
        self.resize = BilinearResize(spec.grid.shape)
        self.decoder = Decoder(section.decoder, tuple(dim), spec.out_channels * spec.output_frames, condition_dims)
        self.decoder.head.mark_channels(spec.output_frames)
        add_dropout_noise(self, section, section.attn_dropout, section.ff_dropout)
        # Spectral norm wraps the weights of all layers that exist, so it must follow after the last layer.
        if section.use_spectral_norm:
            apply_spectral_norm(self)
        self.initialise_unless_meta()

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> WXFormer:
        """Build a WXFormer from keyword arguments, for use without a config.

        Args:
            **kwargs: the arguments of `ModelSpec.from_sizes` (`image_height`, `image_width`, `in_channels`,
                `out_channels`, ...) and the keys of `WXFormerSection`. The defaults are the settings of the published
                weights.

        Raises:
            ConfigError: if a keyword argument is unknown, or values contradict each other.
        """
        defaults = {"type": "wxformer", **PUBLISHED_SETTINGS}
        return cls(*parse_keyword_arguments(WXFormerSection, defaults, kwargs))

    def forward(self, x_BCTHW: Tensor, condition: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the normalised output; see `ForecastModel.forward` for arguments, shapes and errors."""
        x_BCHW = self.flatten_frames(x_BCTHW)
        stage_conditions = self.noise(condition, x_BCHW.dtype)
        noise_BKHW = self.noise.pad_fields(condition, x_BCHW.dtype)
        stage_outputs = []
        for stage, conditions in zip(self.stages, stage_conditions, strict=True):
            x_BCHW = stage(x_BCHW, conditions, noise_BKHW)
            stage_outputs.append(x_BCHW)
            # Only the first stage reads fields of noise.
            noise_BKHW = None
        # The decoder crops the padding.
        y_BCHW = self.decoder(stage_outputs, stage_conditions, margins=(self.padding.lat, self.padding.lon))
        if self.decoder_output_shape != self.spec.grid.shape:
            y_BCHW = self.resize(y_BCHW)
        return y_BCHW.unflatten(1, self.spec.out_shape[:2]).contiguous()

    def plan_domain(self, num_parts: tuple[int, int]) -> DomainPlan:
        """Return the divisions and rules for domain parallelism with M x N parts of the grid.

        Args:
            num_parts: (M, N) numbers of parts of the latitude rows and of the longitude columns.

        Raises:
            ConfigError: if the grid cannot be divided in this way.
        """
        from credit.models.wxformer.domain import plan_wxformer

        return plan_wxformer(self, num_parts)

    @classmethod
    def convert_published_state(cls, state: Mapping[str, Tensor], section: ModelSection) -> dict[str, Tensor]:
        """Convert the state dict of published weights to the names and layouts of this class.

        Args:
            state: published state dict, see `credit.models.wxformer.convert_published.convert_published_state`.
            section: the config section of the model; only ``dim_head`` is used.

        Raises:
            CheckpointError: if the state dict has keys that the published implementation does not have; the message
                names these keys.
        """
        from credit.models.wxformer.convert_published import convert_published_state

        return convert_published_state(state, section.dim_head)
