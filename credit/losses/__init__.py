"""Training losses."""

from credit.losses.weighted import WeightedLoss, build_loss

__all__ = ["WeightedLoss", "build_loss"]
