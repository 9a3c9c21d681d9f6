"""Config section of the losses that are a function of the error in one cell."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from credit.config.sections.loss import LossSection


class PointwiseSection(LossSection):
    """A loss of the error in each cell, taken in normalised space and averaged with weights."""

    kind: Literal["mse", "mae", "huber"] = Field("mse", description="Squared, absolute or Huber's error.")
    huber_delta: float = Field(1.0, gt=0, description="Where Huber's loss turns linear, in normalised units.")
    global_mean: float = Field(
        0.0,
        ge=0,
        description="Weight of the squared error of each channel's global mean, added to the loss. Errors of the mean "
        "are a few hundredths of those in a cell, too small to be seen, and add up over a long free run; 100 shows "
        "them.",
    )
