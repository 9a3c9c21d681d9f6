"""Spherical Fourier neural operator (SFNO) on a global latitude-longitude grid.

Source: Bonev et al. 2023, arXiv 2306.03838. FourCastNet 3 (Bonev et al. 2025, arXiv 2507.12144) combines SFNO blocks
with local filters; local filters are not implemented here. The blocks are pre-norm, like the transformer layers of this
package. docs/model_sfno.md lists the differences from the paper.

Shape suffixes: B batch, C channels, T time frames, H and W latitude rows and longitude columns, K channels of noise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.errors import ConfigError
from credit.grid import LatLonGrid
from credit.models.base import ForecastModel, ModelSpec
from credit.models.data_axes import mark_input_layer, mark_output_layer
from credit.models.layers.norm import NO_CONDITION_DIMS, NO_CONDITIONS, ConditionDims, Conditions, LayerNorm
from credit.models.layers.padding import NO_PADDING
from credit.models.layers.transformer_layer import FeedForward
from credit.models.noise.noise_embedding import NoiseFieldEmbedding
from credit.models.noise.noise_input import (
    NOISE_KINDS,
    NoiseInput,
    add_dropout_noise,
    build_condition_dims,
    count_noise_channels,
)
from credit.models.registry import register_model
from credit.models.sfno.section import SFNOSection
from credit.models.sfno.spherical_filter import SphericalFilter
from credit.models.sfno.token_transform import TokenTransform
from credit.physics.legendre_tables import max_resolved_degree
from credit.physics.spherical_harmonics import build_gaussian_grid, max_wavenumber

# Size of the smallest inner grid. On this grid, the 2/3 rule still allows waves of degree 2.
_MIN_ROWS = 4
_MIN_COLUMNS = 8


class PointwiseMLP(nn.Module):
    """MLP over the channels of each cell (linear, GELU, linear), used as encoder and as decoder.

    Args:
        in_dim: channels of the input.
        hidden_dim: hidden channels.
        out_dim: channels of the output.
    """

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        self.expand = nn.Linear(in_dim, hidden_dim)
        self.contract = nn.Linear(hidden_dim, out_dim)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Return the outputs of each cell (B, H, W, out_dim) from its inputs (B, H, W, in_dim)."""
        return self.contract(F.gelu(self.expand(x_BHWC)))


class RowEmbedding(nn.Module):
    """Layer that adds a learned vector for each row of the grid to the tokens of the row; the initial vectors are zero.

    Args:
        num_rows: rows of the grid.
        dim: channels of the tokens.
    """

    # The vectors are offsets like a bias, so they have no weight decay.
    has_weight_decay = False
    # Dimension of the rows of the grid, for runs that start from weights of a different grid.
    row_dims = {"vectors": 0}

    def __init__(self, num_rows: int, dim: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(num_rows, dim))

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return zeros of `shape`, on the CPU."""
        return torch.zeros(shape, device="cpu")

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Return the sum of the tokens and the vectors of their rows, (B, H, W, C), in the dtype of the tokens."""
        return x_BHWC + self.vectors[:, None].to(x_BHWC.dtype)


class SFNOBlock(nn.Module):
    """SFNO block: spherical filter and MLP of each cell, both pre-norm and with a residual connection.

    A block is one unit of sharding and checkpointing. Only the MLP can be split over tensor-parallel ranks.

    Args:
        section: the config section of the model, which contains the sizes and the dropout.
        analysis: transform on the grid of the input.
        synthesis: transform on the grid of the output.
        condition_dims: lengths of the conditions that the norms depend on.
    """

    _fsdp2_shard = True
    _tp_plan = {"feed_forward.expand": "colwise", "feed_forward.contract": "rowwise"}

    def __init__(
        self,
        section: SFNOSection,
        analysis: TokenTransform,
        synthesis: TokenTransform,
        condition_dims: ConditionDims = NO_CONDITION_DIMS,
    ) -> None:
        super().__init__()
        self.norm = LayerNorm(section.dim, condition_dims)
        # The norm scales tokens to variance 1, so the filters of all blocks add at most a total variance of about 1.
        self.filter = SphericalFilter(section.dim, analysis, synthesis, gain=1 / section.depth)
        self.feed_forward = FeedForward(section.dim, section.ff_dropout, condition_dims, section.hidden_dim)

    def forward(
        self,
        x_BHWC: Tensor,
        conditions: Conditions = NO_CONDITIONS,
        output_conditions: Conditions = NO_CONDITIONS,
    ) -> Tensor:
        """Return tokens (B, H, W, C) on the grid of the output.

        Args:
            x_BHWC: tokens on the grid of the input.
            conditions: vectors of each sample or cell on the grid of the input, such as noise, for the first norm.
            output_conditions: vectors on the grid of the output, for the second norm and for dropout.
        """
        x_BHWC = self.filter(x_BHWC, self.norm(x_BHWC, conditions))
        return x_BHWC + self.feed_forward(x_BHWC, output_conditions)


@register_model("sfno", SFNOSection)
class SFNO(ForecastModel):
    """Spherical Fourier neural operator: alternating filters of spherical-harmonic coefficients and MLPs of each cell.

    An encoder maps the channels of each cell to a token. Blocks filter the tokens on the sphere. A decoder maps each
    token and the input of its cell to the output. Components of vectors are treated as scalars.

    Args:
        spec: channels, grid and frames of the data.
        section: sizes and options, described in `SFNOSection`.

    Attributes:
        transforms: transform on the grid of the data, and transform on the inner grid; the same object twice if the
            grids are equal.
        blocks: the blocks. The first block changes from the grid of the data to the inner grid; the last block changes
            back.

    Raises:
        ConfigError: if ``scale_factor`` or ``max_degree`` is too large for the grid, or an inner grid has a single
            block.
    """

    output_is_new = True
    casts_weights = True
    conditions = NOISE_KINDS

    def __init__(self, spec: ModelSpec, section: SFNOSection) -> None:
        super().__init__(spec, section)
        dim = section.dim
        in_dim = spec.in_channels * spec.input_frames
        self.transforms = _build_transforms(spec.grid, section)
        outer, inner = self.transforms

        self.encoder = PointwiseMLP(in_dim, section.hidden_dim, dim)
        mark_input_layer(self.encoder.expand, spec.input_frames)
        self.row_embedding = None
        if section.row_embedding:
            self.row_embedding = RowEmbedding(spec.grid.shape[0], dim)
        # Noise is needed on the grid of the data and on the inner grid.
        strides = (1,) if section.scale_factor == 1 else (1, section.scale_factor)
        self.noise = NoiseInput(section, NO_PADDING, strides)
        self.noise_embed = None
        field_channels = count_noise_channels(section, "spherical")
        if field_channels:
            self.noise_embed = NoiseFieldEmbedding(field_channels, dim, stride=1)

        condition_dims = build_condition_dims(section)
        self.blocks = nn.ModuleList()
        for number in range(section.depth):
            analysis = outer if number == 0 else inner
            synthesis = outer if number == section.depth - 1 else inner
            self.blocks.append(SFNOBlock(section, analysis, synthesis, condition_dims))
        # The skip connection from the input provides the short waves that the inner grid does not resolve.
        self.decoder = PointwiseMLP(dim + in_dim, section.hidden_dim, spec.out_channels * spec.output_frames)
        mark_input_layer(self.decoder.expand, spec.input_frames, start=dim)
        mark_output_layer(self.decoder.contract, spec.output_frames)
        add_dropout_noise(self, section, feed_forward_rate=section.ff_dropout)
        self.initialise_unless_meta()

    def forward(self, x_BCTHW: Tensor, condition: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the normalised output; see `ForecastModel.forward` for arguments, shapes and errors."""
        x_BCHW = self.flatten_frames(x_BCTHW)
        # The tables are loaded here, because the blocks may be compiled.
        for transform in self.transforms:
            transform.load_tables(x_BCHW)
        grid_conditions = self.noise(condition, x_BCHW.dtype)
        # The list has a single entry if the inner grid is the grid of the data.
        outer_conditions, inner_conditions = grid_conditions[0], grid_conditions[-1]

        x_BHWC = x_BCHW.permute(0, 2, 3, 1).contiguous()
        token_BHWC = self.encoder(x_BHWC)
        if self.row_embedding is not None:
            token_BHWC = self.row_embedding(token_BHWC)
        noise_BKHW = self.noise.pad_fields(condition, x_BCHW.dtype)
        if noise_BKHW is not None:
            token_BHWC = token_BHWC + self.noise_embed(noise_BKHW).permute(0, 2, 3, 1)
        conditions = outer_conditions
        for number, block in enumerate(self.blocks):
            is_last = number == len(self.blocks) - 1
            output_conditions = outer_conditions if is_last else inner_conditions
            token_BHWC = block(token_BHWC, conditions, output_conditions)
            conditions = output_conditions
        y_BHWC = self.decoder(torch.cat((token_BHWC, x_BHWC), dim=-1))
        return y_BHWC.permute(0, 3, 1, 2).unflatten(1, self.spec.out_shape[:2]).contiguous()


def _build_transforms(grid: LatLonGrid, section: SFNOSection) -> tuple[TokenTransform, TokenTransform]:
    """Return the transforms on the grid of the data and on the inner grid; the same object twice for equal grids.

    Args:
        grid: grid of the data.
        section: the config section of the model.

    Raises:
        ConfigError: if ``scale_factor`` or ``max_degree`` is too large, or two grids have only one block; the message
            names the key and a valid value.
    """
    scale_factor = section.scale_factor
    num_rows, num_columns = grid.shape
    largest_factor = max(1, min(num_rows // _MIN_ROWS, num_columns // _MIN_COLUMNS))
    if scale_factor > largest_factor:
        raise ConfigError(
            f"model.scale_factor: {scale_factor} leaves {num_rows // scale_factor} x {num_columns // scale_factor} "
            f"cells of {num_rows} x {num_columns} for the inner grid, which needs at least {_MIN_ROWS} x "
            f"{_MIN_COLUMNS}; the largest valid value is {largest_factor}"
        )
    if scale_factor > 1 and section.depth < 2:
        raise ConfigError(
            f"model.depth: {section.depth} block cannot use an inner grid (model.scale_factor: {scale_factor}): "
            "the first block changes to the inner grid and the last block changes back; set model.depth to 2 or more, "
            "or model.scale_factor to 1"
        )
    inner_grid = grid
    if scale_factor > 1:
        inner_grid = build_gaussian_grid(num_rows // scale_factor, num_columns // scale_factor)
    limit = min(max_resolved_degree(grid), max_resolved_degree(inner_grid))
    max_degree = section.max_degree
    if max_degree is None:
        max_degree = min(max_wavenumber(inner_grid), limit)
    if max_degree > limit:
        raise ConfigError(
            f"model.max_degree: {max_degree} is more than {limit}, the largest degree that the inner grid of "
            f"{inner_grid.shape[0]} x {inner_grid.shape[1]} cells resolves; set it to {limit} or less, or lower "
            "model.scale_factor"
        )
    outer = TokenTransform(grid, max_degree)
    inner = outer if scale_factor == 1 else TokenTransform(inner_grid, max_degree)
    return outer, inner
