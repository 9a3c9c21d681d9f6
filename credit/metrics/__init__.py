"""Metrics of validation during training."""

from credit.metrics.errors import ErrorSums

__all__ = ["ErrorSums"]
