"""Config section of WXFormer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from credit.config.sections.base import StrictModel
from credit.config.sections.model import ModelSection


class PaddingConfig(StrictModel):
    """Cells added round the grid before the first stage."""

    mode: Literal["earth", "mirror"] = Field("earth", description="`earth` continues across the pole.")
    lat: list[int] | Literal["auto"] = Field("auto", description="[north, south] rows; `auto`: least that fits.")
    lon: list[int] | Literal["auto"] = Field("auto", description="[west, east] columns; `auto`: least that fits.")
    pole: Literal["published", "exact"] = Field(
        "published", description="`exact` changes the sign of wind components across a pole and skips a pole row."
    )


class WXFormerSection(ModelSection):
    """WXFormer: a CrossFormer encoder and a convolutional decoder."""

    type: Literal["wxformer"] = Field(description="The model's registered name.")
    dim: list[int] = Field([32, 64, 128, 256], min_length=4, max_length=4, description="Channels by stage.")
    depth: list[int] = Field([2, 2, 8, 2], min_length=4, max_length=4, description="Transformer layers by stage.")
    dim_head: int = Field(32, gt=0, description="Channels of an attention head.")
    global_window_size: list[int] = Field(
        [8, 4, 2, 1], min_length=4, max_length=4, description="Long-attention window by stage."
    )
    local_window_size: int | list[int] = Field(4, description="Short-attention window, one or by stage.")
    cross_embed_kernel_sizes: list[list[int]] = Field(
        [[4, 8, 16, 32], [2, 4], [2, 4], [2, 4]], min_length=4, max_length=4, description="Embedding kernels by stage."
    )
    cross_embed_strides: list[int] = Field(
        [2, 2, 2, 2], min_length=4, max_length=4, description="Embedding stride by stage."
    )
    attn_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of attention probabilities.")
    ff_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout in the feed-forward.")
    use_spectral_norm: bool = Field(True, description="Normalise every weight by its spectral norm.")
    interp: bool = Field(True, description="Interpolate bilinearly to the grid where the decoder's output differs.")
    decoder: Literal["pixel_shuffle", "transposed"] = Field("pixel_shuffle", description="Kind of up-sampling.")
    padding: PaddingConfig | None = Field(PaddingConfig(), description="Padding of the sphere; null for none.")
    position_bias_index: Literal["published", "exact"] = Field(
        "published", description="`exact` corrects the lookup that the published weights were trained with."
    )
