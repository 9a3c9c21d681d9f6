"""Training losses: `base` has the base classes, `registry` the decorator for plugins, `build` builds a run's loss.

This module does not import torch, so that the config sections of losses can be found without torch.
"""

from credit.losses.registry import register_loss

__all__ = ["register_loss"]
