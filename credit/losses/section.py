"""Config section of the losses that are a function of the error in one cell."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from credit.config.sections.loss import LossSection


class PointwiseSection(LossSection):
    """A loss that is a function of the normalised error in each cell, averaged with weights."""

    kind: Literal["mse", "mae", "huber"] = Field("mse", description="Squared error, absolute error or Huber loss.")
    huber_delta: float = Field(
        1.0, gt=0, description="Error at which the Huber loss becomes linear, in normalised units."
    )
    global_mean: float = Field(
        0.0,
        ge=0,
        description="Weight of an additional term: the squared error of each channel's global mean. Errors of the "
        "mean are too small to matter in the pointwise loss, but accumulate in a long rollout. A weight "
        "of 100 makes them visible.",
    )
