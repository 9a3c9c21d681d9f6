"""WXFormer: a CrossFormer encoder and a convolutional U-Net decoder on a global latitude-longitude grid.

CrossFormer: Wang et al. 2021, arXiv 2108.00154. WXFormer: Schreck et al. 2025, npj Clim. Atmos. Sci. 8:239. With
default options this computes the function that the published weights were trained for.

Shape suffixes: B batch, C channels, T time frames, H and W latitude rows and longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.config.schema_model import ModelSection
from credit.errors import ConfigError
from credit.models.base import ForecastModel, ModelSpec, require_input_shape
from credit.models.initialise import initialise_
from credit.models.layers.cross_scale_embedding import CrossScaleEmbedding
from credit.models.layers.padding import NO_PADDING, build_padding, check_windows, stage_sizes
from credit.models.layers.spectral_norm import apply_spectral_norm
from credit.models.layers.up_sampling import Decoder
from credit.models.layers.window_attention import TransformerLayer
from credit.models.registry import register_model
from credit.models.wxformer.section import WXFormerSection

STAGES = 4


class EncoderStage(nn.Module):
    """Cross-scale embedding followed by transformer layers."""

    def __init__(self, embed: CrossScaleEmbedding, layers: Sequence[TransformerLayer]) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(layers)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return (B, dim, H / stride, W / stride) in channels-last memory."""
        x_BHWC = self.embed(x_BCHW)
        for layer in self.layers:
            x_BHWC = layer(x_BHWC)
        return x_BHWC.permute(0, 3, 1, 2)


@register_model("wxformer", WXFormerSection)
class WXFormer(ForecastModel):
    """Global weather model; maps T input frames to T_out output frames.

    Weights start from torch's global random state; `initialise` makes them a function of a seed. A model built on
    the meta device is left unfilled.

    Args:
        spec: channels, grid, frames.
        section: sizes and options; what each key means stands in `WXFormerSection`.

    Raises:
        ConfigError: for values that do not fit together.
    """

    output_is_new = True
    casts_weights = True

    def __init__(self, spec: ModelSpec, section: WXFormerSection) -> None:
        super().__init__(spec, section)
        dim = section.dim
        strides = section.cross_embed_strides
        local_windows = section.local_window_size
        if isinstance(local_windows, int):
            local_windows = [local_windows] * STAGES
        _check_section(section, local_windows)
        _check_vector_channels(spec.vector_channels, spec.in_channels)
        windows = list(zip(section.global_window_size, local_windows, strict=True))
        height, width = spec.grid.shape
        frames = spec.input_frames
        self.padding = build_padding(
            section.padding.model_dump() if section.padding is not None else None,
            grid=(height, width),
            strides=strides,
            windows=windows,
            vector_channels=[channel * frames + frame for channel in spec.vector_channels for frame in range(frames)],
            pole_points=spec.grid.has_pole_points,
        )
        check_windows("lat", height, self.padding.lat, strides, windows)
        check_windows("lon", width, self.padding.lon, strides, windows)
        self._check_output_size(strides, section.interp)

        in_widths = (spec.in_channels * frames, *dim)
        self.stages = nn.ModuleList()
        for i in range(STAGES):
            embed = CrossScaleEmbedding(
                in_widths[i],
                dim[i],
                tuple(section.cross_embed_kernel_sizes[i]),
                strides[i],
                self.padding if i == 0 else NO_PADDING,
            )
            layers = [
                TransformerLayer(
                    dim[i],
                    section.dim_head,
                    local_window=local_windows[i],
                    global_window=section.global_window_size[i],
                    attn_dropout=section.attn_dropout,
                    ff_dropout=section.ff_dropout,
                    bias_index=section.position_bias_index,
                )
                for _ in range(section.depth[i])
            ]
            self.stages.append(EncoderStage(embed, layers))
        self.decoder = Decoder(section.decoder, tuple(dim), spec.out_channels * spec.output_frames)
        if section.use_spectral_norm:
            apply_spectral_norm(self)
        if not next(self.parameters()).is_meta:
            self.initialise(int(torch.randint(2**62, (), device="cpu")))

    def initialise(self, seed: int) -> None:
        """Fill every parameter and buffer in place with values that depend on (seed, name) alone.

        A sharded model is filled from `credit.models.initialise.initial_values` instead.
        """
        initialise_(self, seed)

    def forward(self, x_BCTHW: Tensor, condition: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the output fields.

        Args:
            x_BCTHW: input (batch, in_channels, frames, rows, columns).
            condition: WXFormer takes none.

        Returns:
            (batch, out_channels, output_frames, rows, columns), contiguous.

        Raises:
            ValueError: if the input has other channels, frames, rows or columns than the model was built for.
        """
        require_input_shape(x_BCTHW, self.spec)
        x_BCHW = x_BCTHW.flatten(1, 2)
        # the meta device has no autocast
        is_autocast = not x_BCHW.is_meta and torch.is_autocast_enabled(x_BCHW.device.type)
        if not is_autocast:
            # FSDP2 casts the input with the weights, unless trainer.fsdp2_mp_policy.cast_forward_inputs is false
            x_BCHW = x_BCHW.to(next(self.parameters()).dtype)
        outputs = []
        for stage in self.stages:
            x_BCHW = stage(x_BCHW)
            outputs.append(x_BCHW)
        y_BCHW = self.decoder(outputs, (self.padding.lat, self.padding.lon))
        grid = self.spec.grid.shape
        if y_BCHW.shape[-2:] != grid:
            y_BCHW = F.interpolate(y_BCHW, size=grid, mode="bilinear", align_corners=False)
        return y_BCHW.unflatten(1, self.spec.out_shape[:2]).contiguous()

    @classmethod
    def convert_published_state(cls, state: Mapping[str, Tensor], section: ModelSection) -> dict[str, Tensor]:
        """See the base class and `credit.models.wxformer.convert_published`."""
        from credit.models.wxformer.convert_published import convert_published_state

        return convert_published_state(state, section.dim_head)

    def _check_output_size(self, strides: Sequence[int], interp: bool) -> None:
        """Raise unless the decoder's output, less the padding, has the grid's size or may be interpolated to it."""
        grid = self.spec.grid.shape
        pads = (sum(self.padding.lat), sum(self.padding.lon))
        shape = tuple(2 * stage_sizes(n + pad, strides)[0] - pad for n, pad in zip(grid, pads, strict=True))
        if min(shape) < 1 or (shape != grid and not interp):
            raise ConfigError(
                f"model.interp: {interp}, but the decoder gives {shape[0]} x {shape[1]} cells for a grid of "
                f"{grid[0]} x {grid[1]}; set it to true, or choose strides of 2 and even padded sizes"
            )


def _check_section(section: WXFormerSection, local_windows: Sequence[int]) -> None:
    """Refuse sizes that do not fit together."""
    by_stage = {
        "dim": section.dim,
        "depth": section.depth,
        "global_window_size": section.global_window_size,
        "local_window_size": local_windows,
        "cross_embed_kernel_sizes": section.cross_embed_kernel_sizes,
        "cross_embed_strides": section.cross_embed_strides,
    }
    for key, value in by_stage.items():
        if len(value) != STAGES:
            raise ConfigError(
                f"model.{key}: {list(value)} has {len(value)} entries, one is needed for each of the {STAGES} stages"
            )
        if key != "cross_embed_kernel_sizes" and min(value) < 1:
            raise ConfigError(f"model.{key}: {list(value)} must be 1 or more in every stage")
    _check_widths(section.dim, section.dim_head)
    _check_embedding(section.cross_embed_kernel_sizes, section.cross_embed_strides)


def _check_widths(dim: Sequence[int], dim_head: int) -> None:
    doubled = [dim[0] * 2**i for i in range(STAGES)]
    if list(dim) != doubled:
        raise ConfigError(
            f"model.dim: {list(dim)} must double from stage to stage, as the decoder halves it; for example {doubled}"
        )
    if dim[0] % dim_head:
        fits = [n for n in range(1, dim[0] + 1) if dim[0] % n == 0]
        nearest = min(fits, key=lambda n: abs(n - dim_head))
        raise ConfigError(
            f"model.dim_head: {dim_head} does not divide the {dim[0]} channels of the first stage; nearest is {nearest}"
        )
    if dim[0] < 4:
        raise ConfigError(f"model.dim: {list(dim)} is too narrow, the position bias needs at least 4 channels")


def _check_embedding(kernel_sizes: Sequence[Sequence[int]], strides: Sequence[int]) -> None:
    for i, (kernels, stride) in enumerate(zip(kernel_sizes, strides, strict=True)):
        if i and stride != 2:
            raise ConfigError(
                f"model.cross_embed_strides: {list(strides)}: stage {i} must have stride 2, "
                "as each decoder block doubles the size"
            )
        if not kernels or min(kernels) < stride:
            raise ConfigError(
                f"model.cross_embed_kernel_sizes: {list(kernels)} in stage {i}: every kernel must be at least the "
                f"stride, {stride}"
            )


def _check_vector_channels(channels: Sequence[int], in_channels: int) -> None:
    outside = [c for c in channels if not 0 <= c < in_channels]
    if outside:
        raise ConfigError(
            f"model.vector_channels: {outside} are not among the {in_channels} input channels, counted from 0"
        )
