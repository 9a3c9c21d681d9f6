"""Training losses: `base` has the base classes, `registry` the decorator of plugins, `build` makes a run's loss.

This file imports no torch, so that a config finds the section of a loss without it.
"""

from credit.losses.registry import register_loss

__all__ = ["register_loss"]
