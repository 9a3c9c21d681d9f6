"""Registry of models by name (``model.type``).

A registered class derives from `credit.models.base.ForecastModel` and is built from a `ModelSpec` and its own config
section. It maps (batch, in_channels, input_frames, rows, columns) to (batch, out_channels, output_frames, rows,
columns). Training builds it on the meta device and fills it from `credit.models.initialise.initial_values`.

This module does not import torch, so that a config can be loaded without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from credit.config.registry import MODELS
from credit.config.sections.model import ModelSection
from credit.errors import ConfigError

if TYPE_CHECKING:
    from credit.models.base import ForecastModel, ModelSpec

ModelClass = TypeVar("ModelClass", bound="type[ForecastModel]")


def register_model(name: str, section: type[ModelSection]) -> Callable[[ModelClass], ModelClass]:
    """Class decorator that makes a model available as ``model.type: name``; `section` describes its config keys.

    Args:
        name: value of ``model.type`` in a config.
        section: class of the model's config section. It derives from `ModelSection`; each key has a `pydantic.Field`
            with a description.

    Raises:
        ConfigError: if another class is registered as `name`, or the class does not derive from `ForecastModel`.
    """

    def register(cls: ModelClass) -> ModelClass:
        # Imported here because the base class needs torch, which this module must not load.
        from credit.models.base import ForecastModel

        return MODELS.register(name, section, ForecastModel, ModelSection)(cls)

    return register


def model_class(name: str) -> type[ForecastModel]:
    """Return the model class that is registered as `name`.

    Raises:
        ConfigError: if no class is registered as `name`; the message suggests the most similar name.
    """
    return MODELS.find_class(name)


def model_names() -> list[str]:
    """Return the names of all models, sorted."""
    return MODELS.names()


def build_model(spec: ModelSpec, section: ModelSection) -> ForecastModel:
    """Build the model that ``section.type`` names.

    Args:
        spec: channels, grid and frames of the data.
        section: the model's section of the config.

    Raises:
        ConfigError: if the type is unknown, the model does not support a kind of noise in the section, or a parameter
            is complex or shared by two modules.
    """
    cls = model_class(section.type)
    for noise in section.noise:
        if noise.kind not in cls.conditions:
            accepted = ", ".join(cls.conditions) or "none"
            raise ConfigError(
                f"model.noise: {noise.kind} is not supported by model.type {section.type}; supported kinds: {accepted}"
            )
    model = cls(spec, section)
    _require_trainable(model)
    return model


def _require_trainable(model: ForecastModel) -> None:
    """Check that this package can allocate and train all parameters of a model.

    Raises:
        ConfigError: if two modules share a parameter, or a parameter is complex; the message names the parameter.
    """
    # `id` of a parameter -> its first name
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            # Memory is allocated module by module, so a parameter of two modules would become two parameters.
            first_name = names.setdefault(id(parameter), name)
            if first_name != name:
                raise ConfigError(
                    f"model.type: {first_name} and {name} are the same parameter, which is not supported; "
                    "create one module and call it in both places"
                )
            if parameter.is_complex():
                raise ConfigError(
                    f"model.type: {name} is complex, but fused AdamW cannot train complex parameters; store real and "
                    "imaginary part in a last dimension of size 2, and use torch.view_as_complex in forward"
                )
