"""Config sections of the kinds of noise."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from credit.config.sections.model import ModelNoiseSection

Length = Annotated[float, Field(gt=0)]


class GaussianNoiseSection(ModelNoiseSection):
    """Base class of the config sections of Gaussian noise, which consists of channels."""

    channels: int

    @model_validator(mode="after")
    def _require_channel_for_each_memory(self) -> GaussianNoiseSection:
        if len(self.memory) > self.channels:
            raise ValueError(
                f"model.noise: {len(self.memory)} values of memory share {self.channels} channels; give more channels"
            )
        return self


class GlobalNoiseSection(GaussianNoiseSection):
    """Config of `global` noise: a random vector for each member, which scales and shifts the results of the norms."""

    kind: Literal["global"] = Field("global", description="One random vector for the whole globe.")
    channels: int = Field(32, ge=1, description="Length of the vector.")


class CellNoiseSection(GaussianNoiseSection):
    """Config of `cell` noise: random numbers for each cell of the grid.

    The numbers scale and shift the results of the norms. The network `graph` adds them to the embedded grid points.
    """

    kind: Literal["cell"] = Field("cell", description="Random numbers that are independent from cell to cell.")
    channels: int = Field(4, ge=2, description="Number of random numbers for each cell.")


class SphericalNoiseSection(GaussianNoiseSection):
    """Config of `spherical` noise: random fields with spatial correlation, an additional input of the network."""

    kind: Literal["spherical"] = Field("spherical", description="Random fields with spatial correlation.")
    channels: int = Field(8, ge=1, description="Number of random fields.")
    lengths: list[Length] = Field(
        [500.0, 1000.0, 2000.0, 4000.0],
        min_length=1,
        description="Correlation lengths in km. The fields are divided evenly among the lengths, and in the same way "
        "among the values of `memory`: the first fields have the first length and the first memory.",
    )

    @model_validator(mode="after")
    def _require_channel_for_each_length(self) -> SphericalNoiseSection:
        if len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"model.noise: lengths {self.lengths} must differ; remove the repeated values")
        if len(self.lengths) > self.channels:
            raise ValueError(
                f"model.noise: {len(self.lengths)} lengths share {self.channels} channels; give more channels"
            )
        return self


class DropoutNoiseSection(ModelNoiseSection):
    """Config of `dropout` noise, which stays active in forecasts.

    If ``memory`` has several values, successive layers use successive values; after the last value, the first follows.
    """

    kind: Literal["dropout"] = Field("dropout", description="Dropout that stays active in forecasts.")
    rate: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Probability of dropping a hidden channel of a feed-forward layer. Default: `model.ff_dropout`, or "
        "0.1 if the model has no dropout. For attention, the probability is `model.attn_dropout`.",
    )
