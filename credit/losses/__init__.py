"""Training losses."""

from credit.losses.pointwise import register_loss
from credit.losses.weighted import WeightedLoss, build_loss

__all__ = ["WeightedLoss", "build_loss", "register_loss"]
