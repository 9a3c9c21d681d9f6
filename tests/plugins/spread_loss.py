"""Example of a loss with a parameter and a member axis: absolute error of the members minus a share of their spread.

With ``spread_share: 1`` it is the kernel form of the CRPS (Gneiting and Raftery 2007, doi:10.1198/016214506000001437).
A single member has no spread and scores the mean absolute error.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from credit.config.sections.loss import LossSection
from credit.losses import register_loss
from credit.losses.base import Loss, LossContext


class SpreadLossSection(LossSection):
    """Config section of the loss."""

    kind: Literal["spread"] = Field(description="Error less spread.")
    spread_share: float = Field(1.0, ge=0, le=1, description="Share of the spread that is taken off.")


@register_loss("spread", SpreadLossSection)
class SpreadLoss(Loss):
    """Mean over members of |prediction - target|, minus a share of half the mean |difference of two members|."""

    def __init__(self, context: LossContext, section: SpreadLossSection) -> None:
        super().__init__(context, section)
        self._spread_share = section.spread_share
        scale_C11 = context.error_scale_C[:, None, None]
        self.register_constant("weight_CHW", context.cell_weight_CHW * context.channel_weight_C[:, None, None])
        self.register_constant("scale_C11", scale_C11)

    def forward(self, prediction_BMCHW, target_BCHW):
        """Return the scalar loss."""
        scaled_BMCHW = prediction_BMCHW.float() * self.scale_C11
        target_B1CHW = (target_BCHW.float() * self.scale_C11)[:, None]
        error = (scaled_BMCHW - target_B1CHW).abs().mean(dim=1)
        spread = (scaled_BMCHW[:, :, None] - scaled_BMCHW[:, None]).abs().mean(dim=(1, 2))
        cost_BCHW = error - 0.5 * self._spread_share * spread
        return (cost_BCHW * self.weight_CHW).sum() / len(cost_BCHW)
