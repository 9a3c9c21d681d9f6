"""Networks, the layers that they share, and the registry that finds them by name.

`credit.models.base` is the base class of a model, `credit.models.layers` holds the layers. Nothing here imports torch, so
that a config finds the section of a model without it.
"""

from credit.models.registry import build_model, model_class, model_names, register_model

__all__ = ["build_model", "model_class", "model_names", "register_model"]
