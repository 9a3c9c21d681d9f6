"""Models, and the registry that finds them by name."""

from credit.models.registry import build_model, model_class, model_names, register_model

__all__ = ["build_model", "model_class", "model_names", "register_model"]
