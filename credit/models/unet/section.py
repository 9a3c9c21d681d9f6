"""Config section of the U-Net."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from credit.config.sections.model import ModelSection


class UNetSection(ModelSection):
    """Config of the U-Net: a convolutional network with skip connections and attention at its coarsest levels."""

    type: Literal["unet"] = Field(description="Registered name of the model.")
    dim: list[int] = Field(
        [32, 48, 64, 96],
        min_length=2,
        max_length=6,
        description="Number of channels of each level, the finest level first. Each level has half as many rows and "
        "columns as the previous level.",
    )
    depth: list[int] = Field(
        [1, 1, 1, 1],
        min_length=2,
        max_length=6,
        description="Number of residual blocks of each level of the encoder. Each level of the decoder has one block "
        "more than the same level of the encoder.",
    )
    dim_head: int = Field(
        16, gt=0, description="Number of channels of an attention head; has no effect if no level has attention."
    )
    attention_levels: int = Field(
        2,
        ge=0,
        description="Number of levels with attention to all cells, counted from the coarsest; 0 for no attention.",
    )
    ff_dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout probability of the hidden channels of the residual blocks."
    )
