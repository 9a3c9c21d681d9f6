"""WXFormer: a CrossFormer encoder and a convolutional U-Net decoder on a global latitude-longitude grid.

CrossFormer: Wang et al. 2021, arXiv 2108.00154. WXFormer: Schreck et al. 2025, npj Clim. Atmos. Sci. 8:239. With
default options this computes the function that the published weights were trained for.

Shape suffixes: B batch, C channels, T time frames, H and W latitude rows and longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.errors import ConfigError, did_you_mean
from credit.models.initialise import initialise_
from credit.models.layers.cross_scale_embedding import CrossScaleEmbedding
from credit.models.layers.padding import NO_PADDING, build_padding, check_windows, stage_sizes
from credit.models.layers.up_sampling import Decoder
from credit.models.layers.window_attention import BiasIndex, TransformerLayer
from credit.models.registry import register_model
from credit.models.wxformer import spectral_norm

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


@register_model("wxformer")
class WXFormer(nn.Module):
    """Global weather model; maps T input frames to T_out output frames.

    Weights start from torch's global random state; `initialise` makes them a function of a seed. A model built on
    the meta device is left unfilled.

    Args:
        image_height: latitude rows of the grid, north first.
        image_width: longitude columns of the grid.
        in_channels: input channels of a frame.
        out_channels: output channels of a frame.
        frames: input frames.
        output_frames: output frames.
        dim: channels of the four stages, each twice the one before.
        depth: transformer layers of each stage.
        dim_head: channels per attention head.
        global_window_size: window edge of the long attention of each stage.
        local_window_size: window edge of the short attention, one number or one a stage.
        cross_embed_kernel_sizes: kernel edges of each stage's embedding.
        cross_embed_strides: stride of each stage's embedding; 2 from the second stage on.
        attn_dropout: dropout of attention probabilities in training.
        ff_dropout: dropout inside the feed-forward layers in training.
        use_spectral_norm: normalise every convolution and linear weight, see `spectral_norm`.
        interp: interpolate bilinearly to the grid where strides and pads give another size.
        decoder: `transposed` (published weights) or `pixel_shuffle`.
        padding: keys `mode`, `lat`, `lon`, `pole`, see `padding.build_padding`; None for no padding.
        position_bias_index: `published`, or `exact` for the lookup by true offsets.
        vector_channels: input channels that hold vector components, for `padding.pole: exact`.
        pole_points: whether the grid has rows at the poles, for `padding.pole: exact`.

    Raises:
        ConfigError: for values that do not fit together.
    """

    # see `credit.models.wxformer.inference` and `credit.forecast.stepper`
    _autocast_weights = True
    _output_is_new = True

    def __init__(
        self,
        *,
        image_height: int,
        image_width: int,
        in_channels: int,
        out_channels: int,
        frames: int = 1,
        output_frames: int = 1,
        dim: Sequence[int] = (128, 256, 512, 1024),
        depth: Sequence[int] = (2, 2, 8, 2),
        dim_head: int = 32,
        global_window_size: Sequence[int] = (10, 5, 2, 1),
        local_window_size: int | Sequence[int] = 10,
        cross_embed_kernel_sizes: Sequence[Sequence[int]] = ((4, 8, 16, 32), (2, 4), (2, 4), (2, 4)),
        cross_embed_strides: Sequence[int] = (2, 2, 2, 2),
        attn_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        use_spectral_norm: bool = True,
        interp: bool = True,
        decoder: str = "transposed",
        padding: Mapping[str, Any] | None = None,
        position_bias_index: BiasIndex = "published",
        vector_channels: Sequence[int] = (),
        pole_points: bool = False,
    ) -> None:
        super().__init__()
        local = [local_window_size] * STAGES if isinstance(local_window_size, int) else list(local_window_size)
        strides = cross_embed_strides
        _check_stages(
            dim=dim,
            depth=depth,
            global_window_size=global_window_size,
            local_window_size=local,
            cross_embed_kernel_sizes=cross_embed_kernel_sizes,
            cross_embed_strides=strides,
        )
        _check_widths(dim, dim_head)
        _check_embedding(cross_embed_kernel_sizes, strides)
        _check_choice("decoder", decoder, ("transposed", "pixel_shuffle"))
        _check_choice("position_bias_index", position_bias_index, ("published", "exact"))
        _check_vector_channels(vector_channels, in_channels)
        windows = list(zip(global_window_size, local, strict=True))
        self.in_shape = (in_channels, frames, image_height, image_width)
        self.out_shape = (out_channels, output_frames, image_height, image_width)
        self.padding = build_padding(
            padding,
            grid=(image_height, image_width),
            strides=strides,
            windows=windows,
            vector_channels=[channel * frames + frame for channel in vector_channels for frame in range(frames)],
            pole_points=pole_points,
        )
        check_windows("lat", image_height, self.padding.lat, strides, windows)
        check_windows("lon", image_width, self.padding.lon, strides, windows)
        self._check_output_size(strides, interp)

        widths = (in_channels * frames, *dim)
        self.stages = nn.ModuleList()
        for i in range(STAGES):
            padding = NO_PADDING if i else self.padding
            embed = CrossScaleEmbedding(widths[i], dim[i], tuple(cross_embed_kernel_sizes[i]), strides[i], padding)
            layer = partial(
                TransformerLayer, dim[i], dim_head, local_window=local[i], global_window=global_window_size[i]
            )
            options = {"attn_dropout": attn_dropout, "ff_dropout": ff_dropout, "bias_index": position_bias_index}
            self.stages.append(EncoderStage(embed, [layer(**options) for _ in range(depth[i])]))
        self.decoder = Decoder(decoder, tuple(dim), out_channels * output_frames)
        if use_spectral_norm:
            spectral_norm.apply_spectral_norm(self)
        if not next(self.parameters()).is_meta:
            self.initialise(int(torch.randint(2**62, (), device="cpu")))

    def initialise(self, seed: int) -> None:
        """Fill every parameter and buffer in place with values that depend on (seed, name) alone.

        A sharded model is filled from `credit.models.initialise.initial_values` instead.
        """
        initialise_(self, seed)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        """Return the output fields.

        Args:
            x_BCTHW: input (batch, in_channels, frames, rows, columns).

        Returns:
            (batch, out_channels, output_frames, rows, columns), contiguous.

        Raises:
            ValueError: if the input has other channels, frames, rows or columns than the model was built for.
        """
        if tuple(x_BCTHW.shape[1:]) != self.in_shape:
            raise ValueError(
                f"input is {tuple(x_BCTHW.shape)}, expected a batch of {self.in_shape} "
                "(channel, time, latitude, longitude)"
            )
        spectral_norm.arm_for_forward(self)
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
        grid = self.out_shape[2:]
        if y_BCHW.shape[-2:] != grid:
            y_BCHW = F.interpolate(y_BCHW, size=grid, mode="bilinear", align_corners=False)
        return y_BCHW.unflatten(1, self.out_shape[:2]).contiguous()

    def _check_output_size(self, strides: Sequence[int], interp: bool) -> None:
        """Raise unless the decoder's output, less the padding, has the grid's size or may be interpolated to it."""
        grid = self.out_shape[2:]
        pads = (sum(self.padding.lat), sum(self.padding.lon))
        shape = tuple(2 * stage_sizes(n + pad, strides)[0] - pad for n, pad in zip(grid, pads, strict=True))
        if min(shape) < 1 or (shape != grid and not interp):
            raise ConfigError(
                f"model.interp: {interp}, but the decoder gives {shape[0]} x {shape[1]} cells for a grid of "
                f"{grid[0]} x {grid[1]}; set it to true, or choose strides of 2 and even padded sizes"
            )


def _check_stages(**settings: Sequence[Any]) -> None:
    for key, value in settings.items():
        if len(value) != STAGES:
            raise ConfigError(
                f"model.{key}: {list(value)} has {len(value)} entries, one is needed for each of the {STAGES} stages"
            )
        if key != "cross_embed_kernel_sizes" and min(value) < 1:
            raise ConfigError(f"model.{key}: {list(value)} must be 1 or more in every stage")


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


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"model.{key}: {value!r} is not a choice{did_you_mean(str(value), choices)}")


def _check_vector_channels(channels: Sequence[int], in_channels: int) -> None:
    outside = [c for c in channels if not 0 <= c < in_channels]
    if outside:
        raise ConfigError(
            f"model.vector_channels: {outside} are not among the {in_channels} input channels, counted from 0"
        )
