"""Models by name.

Every registered class takes the keyword arguments `image_height, image_width, in_channels, out_channels, frames,
output_frames` and its own keys, and maps (B, in_channels, frames, H, W) to (B, out_channels, output_frames, H, W). It
is built on the meta device and filled from `credit.models.initialise.initial_values`. A module in this package
registers its class by being there; a module elsewhere does so by being imported.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from credit.errors import ConfigError, did_you_mean

ModelClass = TypeVar("ModelClass", bound=type[nn.Module])
_MODELS: dict[str, type[nn.Module]] = {}


def register_model(name: str) -> Callable[[ModelClass], ModelClass]:
    """Class decorator that makes a model available as `model.type: name`.

    Raises:
        ConfigError: if another class has the name.
    """

    def register(cls: ModelClass) -> ModelClass:
        other = _MODELS.setdefault(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"model name {name!r} of {cls.__module__} is taken by {other.__module__}; choose another name"
            )
        return cls

    return register


def model_class(name: str) -> type[nn.Module]:
    """Return the class registered as `name`.

    Raises:
        ConfigError: for an unknown name, with the nearest one.
    """
    names = model_names()
    if name not in _MODELS:
        raise ConfigError(f"model.type: {name!r} is not a model{did_you_mean(name, names)}")
    return _MODELS[name]


def build_model(type: str, **settings: Any) -> nn.Module:
    """Return a new model of the registered `type`, built with `settings`.

    Raises:
        ConfigError: for an unknown type, or a model with parameters that cannot be trained here.
    """
    model = model_class(type)(**settings)
    _require_trainable(model)
    return model


def _require_trainable(model: nn.Module) -> None:
    """Refuse parameters that memory or the optimizer would treat as something else.

    Raises:
        ConfigError: naming them.
    """
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            # each module is given memory of its own, so that one parameter would become two
            other = names.setdefault(id(parameter), name)
            if other != name:
                raise ConfigError(
                    f"model.type: {other} and {name} are one parameter in two modules, which is not supported; have "
                    "one module and call it in both places"
                )
            if parameter.is_complex():
                raise ConfigError(
                    f"model.type: {name} is complex, which fused AdamW cannot train; store real and imaginary part in "
                    "a last dimension of 2, and use torch.view_as_complex in forward"
                )


def model_names() -> list[str]:
    """Return the names of all models, those of this package included, sorted."""
    import credit.models as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return sorted(_MODELS)
