"""Config section of the U-Net."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from credit.config.sections.model import ModelSection


class UNetSection(ModelSection):
    """U-Net: a convolutional network with skip connections and attention at its coarsest levels."""

    type: Literal["unet"] = Field(description="Registered name of the model.")
    dim: list[int] = Field(
        [32, 48, 64, 96],
        min_length=2,
        max_length=6,
        description="Number of channels of each level, the finest level first. Each level has half the rows and "
        "columns of the level before.",
    )
    depth: list[int] = Field(
        [1, 1, 1, 1],
        min_length=2,
        max_length=6,
        description="Number of residual blocks of each level of the encoder. The decoder has one block more per level.",
    )
    dim_head: int = Field(
        16, gt=0, description="Number of channels of an attention head; without effect if no level has attention."
    )
    attention_levels: int = Field(
        2, ge=0, description="Number of the coarsest levels whose blocks have attention to all cells; 0 for none."
    )
    ff_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of the hidden channels of the residual blocks.")
