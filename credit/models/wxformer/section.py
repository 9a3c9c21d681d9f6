"""Config section of WXFormer."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from credit.config.sections.model import ModelSection
from credit.models.padding.section import PaddingConfig


class WXFormerSection(ModelSection):
    """Config of WXFormer: a CrossFormer encoder and a convolutional decoder."""

    grid_keys: ClassVar[tuple[str, ...]] = ("padding",)

    type: Literal["wxformer"] = Field(description="Registered name of the model.")
    dim: list[int] = Field(
        [32, 64, 128, 256], min_length=4, max_length=4, description="Number of channels of each stage."
    )
    depth: list[int] = Field(
        [2, 2, 8, 2], min_length=4, max_length=4, description="Number of transformer layers of each stage."
    )
    dim_head: int = Field(32, gt=0, description="Number of channels of an attention head.")
    global_window_size: list[int] = Field(
        [8, 4, 2, 1],
        min_length=4,
        max_length=4,
        description="Edge of a window of long-distance attention in each stage, in cells of the stage.",
    )
    local_window_size: int | list[int] = Field(
        4,
        description="Edge of a window of short-distance attention in cells of the stage: one number for all stages, or "
        "a list with a number for each stage.",
    )
    cross_embed_kernel_sizes: list[list[int]] = Field(
        [[4, 8, 16, 32], [2, 4], [2, 4], [2, 4]],
        min_length=4,
        max_length=4,
        description="Kernel sizes of the cross-scale embedding of each stage, in cells of the input of the stage.",
    )
    cross_embed_strides: list[int] = Field(
        [2, 2, 2, 2], min_length=4, max_length=4, description="Stride of the cross-scale embedding of each stage."
    )
    attn_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability of the attention weights.")
    ff_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability in the feed-forward layers.")
    use_spectral_norm: bool = Field(True, description="Apply spectral normalisation to every weight.")
    interp: bool = Field(
        True,
        description="Interpolate the output of the decoder bilinearly to the grid if the output and the grid differ in "
        "size.",
    )
    decoder: Literal["pixel_shuffle", "transposed"] = Field(
        "pixel_shuffle", description="Kind of up-sampling in the decoder."
    )
    padding: PaddingConfig | None = Field(
        PaddingConfig(),
        description="Padding of the input across the poles and around the globe. `auto`: the defaults of all its keys. "
        "null: no padding.",
    )
    position_bias_index: Literal["published", "exact"] = Field(
        "published",
        description="Lookup of the position bias. `exact`: the correct lookup; use this value for new models. "
        "`published`: the lookup with which the published weights were trained.",
    )
