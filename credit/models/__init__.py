"""Networks, the layers that they share, and the registry that finds models by name.

Each name in `__all__` is imported when it is first used, not when this package is imported. A project can therefore use
the layers and LoRA without the packages for the config and for weather data.
"""

from __future__ import annotations

from credit.models.lazy_exports import lazy_exports

# exported name -> module that defines it
_EXPORTS = {
    "ForecastModel": "credit.models.base",
    "ModelSpec": "credit.models.base",
    "build_model": "credit.models.registry",
    "model_class": "credit.models.registry",
    "model_names": "credit.models.registry",
    "register_model": "credit.models.registry",
}
__all__ = ["ForecastModel", "ModelSpec", "build_model", "model_class", "model_names", "register_model"]

__getattr__ = lazy_exports(__name__, _EXPORTS)
