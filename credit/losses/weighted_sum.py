"""Weighted sum of several losses.

Shape suffixes: B batch, M ensemble members, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from torch import Tensor, nn

from credit.config.registry import LOSSES
from credit.losses.base import Loss, LossContext
from credit.losses.registry import register_loss
from credit.losses.section import SumSection


@register_loss("sum", SumSection)
class WeightedSumLoss(Loss):
    """Weighted sum of the losses in ``loss.terms``; all terms use the cell and channel weights of the section ``loss``.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config, with `terms`.
    """

    def __init__(self, context: LossContext, section: SumSection) -> None:
        super().__init__(context, section)
        losses = [LOSSES.find_class(term.kind)(context, term) for term in section.terms]
        self.losses = nn.ModuleList(losses)
        self.weights = [term.weight for term in section.terms]
        # The sum couples every dimension that at least one term couples.
        self.coupled_dims = frozenset()
        for loss in losses:
            self.coupled_dims |= loss.coupled_dims

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return the weighted sum of the losses, a float32 scalar; see `Loss.forward` for the arguments."""
        # The total starts with the first term, because adding the first term to 0 would need an additional kernel.
        first_loss, *other_losses = self.losses
        total = self.weights[0] * first_loss(prediction_BMCHW, target_BCHW)
        for weight, loss in zip(self.weights[1:], other_losses, strict=True):
            total = total + weight * loss(prediction_BMCHW, target_BCHW)
        return total
