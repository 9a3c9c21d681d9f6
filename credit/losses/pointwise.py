"""Built-in pointwise losses: mean squared error, mean absolute error, Huber loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from credit.losses.base import LossContext, PointwiseLoss
from credit.losses.registry import register_loss
from credit.losses.section import PointwiseSection


@register_loss("mse", PointwiseSection)
class MeanSquaredError(PointwiseLoss):
    """Mean squared error: the cost of a cell is its squared error."""

    def cost(self, error_BMCHW: Tensor) -> Tensor:
        """Return the squared error of each cell, (B, M, C, H, W)."""
        return error_BMCHW.square()


@register_loss("mae", PointwiseSection)
class MeanAbsoluteError(PointwiseLoss):
    """Mean absolute error: the cost of a cell is its absolute error."""

    def cost(self, error_BMCHW: Tensor) -> Tensor:
        """Return the absolute error of each cell, (B, M, C, H, W)."""
        return error_BMCHW.abs()


@register_loss("huber", PointwiseSection)
class HuberLoss(PointwiseLoss):
    """Huber loss (Huber 1964, doi:10.1214/aoms/1177703732): quadratic for small errors, linear for large errors.

    The cost of an error e is e^2 / 2 up to the threshold d, and d (abs(e) - d / 2) beyond it.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config. `huber_delta` is the threshold d, for errors scaled by
            ``loss.scaling``.
    """

    def __init__(self, context: LossContext, section: PointwiseSection) -> None:
        super().__init__(context, section)
        self._delta = section.huber_delta

    def cost(self, error_BMCHW: Tensor) -> Tensor:
        """Return the Huber loss of each cell, (B, M, C, H, W)."""
        # torch's function expects prediction and target, so the error is compared with zero.
        zero = torch.zeros_like(error_BMCHW)
        return functional.huber_loss(error_BMCHW, zero, reduction="none", delta=self._delta)
