"""Config sections of the kinds of noise."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from credit.config.sections.model import ModelNoiseSection


class GlobalNoiseSection(ModelNoiseSection):
    """A random vector for each member, which scales and shifts the result of every norm in the network."""

    kind: Literal["global"] = Field("global", description="One random vector for the whole globe.")
    channels: int = Field(32, ge=1, description="Length of the vector.")

    @model_validator(mode="after")
    def _require_channel_for_each_memory(self) -> GlobalNoiseSection:
        if len(self.memory) > self.channels:
            raise ValueError(
                f"model.noise: {len(self.memory)} values of memory share {self.channels} channels; give more channels"
            )
        return self
