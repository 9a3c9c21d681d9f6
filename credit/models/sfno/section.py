"""Config section of the spherical Fourier neural operator."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from credit.config.sections.model import ModelSection


class SFNOSection(ModelSection):
    """Config of SFNO: filters of spherical-harmonic coefficients, alternating with MLPs of each cell."""

    grid_keys: ClassVar[tuple[str, ...]] = ("max_degree",)

    type: Literal["sfno"] = Field(description="Registered name of the model.")
    dim: int = Field(80, ge=1, description="Number of channels of the tokens.")
    depth: int = Field(4, ge=1, description="Number of blocks.")
    mlp_ratio: float = Field(
        2.0, gt=0, description="Number of hidden channels of the MLPs (also of encoder and decoder) divided by `dim`."
    )
    max_degree: int | None = Field(
        None,
        ge=1,
        description="Largest degree and order (wavenumber) of the filters. null: the largest degree that the 2/3 rule "
        "allows on the inner grid, for example 21 on 32 x 64 cells.",
    )
    scale_factor: int = Field(
        1,
        ge=1,
        description="Number of rows of the grid of the data divided by the number of rows of the inner grid; the same "
        "for columns. With 1, all blocks use the grid of the data. Otherwise the inner grid is a Gaussian grid.",
    )
    row_embedding: bool = Field(True, description="Add a learned vector to the tokens of each latitude row.")
    ff_dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout probability of the hidden channels in the MLPs of the blocks."
    )

    @property
    def hidden_dim(self) -> int:
        """Number of hidden channels of every MLP."""
        return max(1, round(self.dim * self.mlp_ratio))
