"""Swin-V2 transformer with the architecture of FuXi, on a global latitude-longitude grid.

FuXi: Chen et al. 2023, arXiv 2306.12873. Swin V2: Liu et al. 2022, arXiv 2111.09883.

Shape suffixes: B batch, C channels, T time frames, H and W latitude rows and longitude columns, K channels of noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from credit.config.sections.model import ModelSection
from credit.models.base import ForecastModel, ModelSpec
from credit.models.checks import parse_keyword_arguments
from credit.models.data_axes import mark_input_layer, mark_output_layer
from credit.models.layers.resize import BilinearResize
from credit.models.layers.spectral_norm import apply_spectral_norm
from credit.models.noise.noise_embedding import NoiseFieldEmbedding
from credit.models.noise.noise_input import (
    NOISE_KINDS,
    NoiseInput,
    add_dropout_noise,
    build_condition_dims,
    count_noise_channels,
)
from credit.models.registry import register_model
from credit.models.swin.attention import ShiftedWindowAttention
from credit.models.swin.blocks import CubeEmbedding, DownBlock, PatchHead, SwinBlock, SwinUpBlock
from credit.models.swin.layout import DOWN_SAMPLING, build_layout, check_noise
from credit.models.swin.section import SwinSection
from credit.models.swin.token_padding import Crop, TokenPadding
from credit.parallel.domain.split import DomainPlan

# The published code adds this finite number to the scores of masked pairs, so masked pairs keep a tiny weight.
PUBLISHED_MASK_VALUE = -100.0


@register_model("swin", SwinSection)
class Swin(ForecastModel):
    """Swin transformer: patch embedding, down-sampling, Swin-V2 blocks, up-sampling and a linear head.

    Args:
        spec: channels, grid and frames of the data.
        section: sizes and options, described in `SwinSection`.

    Attributes:
        layout: sizes of the fields and tokens.
        embedding: embedding of the patches of the padded grid.
        down: block that halves the resolution.
        blocks: transformer blocks; every second block shifts its windows.
        up: block that doubles the resolution of the concatenated outputs of `down` and of the last transformer block.
        head: linear layer from each token to the cells of its patch.

    Raises:
        ConfigError: if sizes in the section contradict each other, or patches or windows do not fit the grid.
    """

    output_is_new = True
    casts_weights = True
    conditions = NOISE_KINDS

    def __init__(self, spec: ModelSpec, section: SwinSection) -> None:
        super().__init__(spec, section)
        layout = build_layout(spec, section)
        check_noise(layout, section)
        self.layout = layout
        wraps_columns = section.edges == "sphere"
        condition_dims = build_condition_dims(section)
        dim = section.dim

        # Layers from cells to patches, and to tokens at half the resolution.
        self.noise = NoiseInput(section, layout.padding, (section.patch_size, DOWN_SAMPLING))
        in_channels = spec.in_channels * spec.input_frames
        self.embedding = CubeEmbedding(in_channels, dim, section.patch_size, layout.padding)
        cells_per_patch = section.patch_size**2
        mark_input_layer(self.embedding.project, spec.input_frames, inner=cells_per_patch)
        field_channels = count_noise_channels(section, "spherical")
        self.noise_embed = None
        if field_channels:
            self.noise_embed = NoiseFieldEmbedding(field_channels, dim, section.patch_size)
        self.down = DownBlock(dim, section.num_groups, condition_dims, wraps_columns=wraps_columns)

        # Layers of the transformer.
        self.pad_tokens = TokenPadding(layout.token_pads)
        self.blocks = nn.ModuleList()
        for number in range(section.depth):
            attention = ShiftedWindowAttention(
                dim,
                section.heads,
                layout.window,
                layout.padded_tokens,
                is_shifted=number % 2 == 1,
                wraps_columns=wraps_columns,
                dropout=section.attn_dropout,
                mask_value=-math.inf if wraps_columns else PUBLISHED_MASK_VALUE,
            )
            self.blocks.append(SwinBlock(attention, dim, section.ff_dropout, condition_dims))
        self.crop_tokens = Crop(layout.token_pads)

        # Layers from tokens back to patches, to cells, and to the grid.
        self.up = SwinUpBlock(dim, section.num_groups, condition_dims, wraps_columns=wraps_columns)
        self.head = PatchHead(dim, spec.out_channels * spec.output_frames, section.patch_size)
        mark_output_layer(self.head, spec.output_frames, outer=cells_per_patch)
        self.crop = Crop((layout.padding.lat, layout.padding.lon))
        self.resize = BilinearResize(spec.grid.shape)

        add_dropout_noise(self, section, section.attn_dropout, section.ff_dropout)
        # Spectral norm wraps the weights of all layers that exist, so it must follow after the last layer.
        if section.use_spectral_norm:
            apply_spectral_norm(self)
        self.initialise_unless_meta()

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Swin:
        """Build a model from keyword arguments, for use without a config.

        Args:
            **kwargs: the arguments of `ModelSpec.from_sizes` (`image_height`, `image_width`, `in_channels`,
                `out_channels`, ...) and the keys of `SwinSection`.

        Raises:
            ConfigError: if an argument is unknown, or values contradict each other.
        """
        return cls(*parse_keyword_arguments(SwinSection, {"type": "swin"}, kwargs))

    def forward(self, x_BCTHW: Tensor, condition: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the normalised output; see `ForecastModel.forward` for arguments, shapes and errors."""
        x_BCHW = self.flatten_frames(x_BCTHW)
        patch_conditions, token_conditions = self.noise(condition, x_BCHW.dtype)
        noise_BKHW = self.noise.pad_fields(condition, x_BCHW.dtype)
        patches_BHWC = self.embedding(x_BCHW)
        if noise_BKHW is not None:
            patches_BHWC = patches_BHWC + self.noise_embed(noise_BKHW).permute(0, 2, 3, 1)
        down_BCHW = self.down(patches_BHWC.permute(0, 3, 1, 2), token_conditions)
        tokens_BHWC = self.pad_tokens(down_BCHW.permute(0, 2, 3, 1))
        for block in self.blocks:
            tokens_BHWC = block(tokens_BHWC, token_conditions)
        tokens_BCHW = self.crop_tokens(tokens_BHWC.permute(0, 3, 1, 2))
        up_BCHW = self.up(torch.cat((down_BCHW, tokens_BCHW), dim=1), patch_conditions)
        y_BCHW = self.crop(self.head(up_BCHW.permute(0, 2, 3, 1)))
        if self.layout.output != self.spec.grid.shape:
            y_BCHW = self.resize(y_BCHW)
        return y_BCHW.unflatten(1, self.spec.out_shape[:2]).contiguous()

    def plan_domain(self, num_parts: tuple[int, int]) -> DomainPlan:
        """Return the divisions and rules for domain parallelism with M x N parts of the grid.

        Args:
            num_parts: (M, N) numbers of parts of the latitude rows and of the longitude columns.

        Raises:
            ConfigError: if the grid cannot be divided in this way.
        """
        from credit.models.swin.domain import plan_swin

        return plan_swin(self, num_parts)

    @classmethod
    def convert_published_state(cls, state: Mapping[str, Tensor], section: ModelSection) -> dict[str, Tensor]:
        """Convert the state dict of published FuXi weights to the names and layouts of this class.

        Args:
            state: published state dict, see `credit.models.swin.convert_published.convert_published_state`.
            section: the config section of the model; not used.

        Raises:
            CheckpointError: if the state dict has keys that the published implementation does not have; the message
                names these keys.
        """
        from credit.models.swin.convert_published import convert_published_state

        return convert_published_state(state)
