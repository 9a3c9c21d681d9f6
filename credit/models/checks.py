"""Checks of config keys and arguments that several networks share. Their error messages suggest valid values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from credit.config.sections.model import ModelSection
from credit.errors import ConfigError, did_you_mean
from credit.models.base import ModelSpec

Section = TypeVar("Section", bound=ModelSection)

# The arguments of `ModelSpec.from_sizes`.
SIZE_ARGUMENTS = (
    "image_height",
    "image_width",
    "in_channels",
    "out_channels",
    "frames",
    "output_frames",
    "vector_channels",
    "pole_points",
)


def find_nearest_divisor(number: int, target: int) -> int:
    """Return the divisor of `number` that is nearest to `target`; both are positive."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return min(divisors, key=lambda divisor: abs(divisor - target))


def parse_keyword_arguments(
    section_class: type[Section], defaults: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[ModelSpec, Section]:
    """Convert keyword arguments to a `ModelSpec` and a config section, to build a network without a config file.

    Args:
        section_class: class of the network's config section.
        defaults: default values of section keys that are not in `arguments`; must contain ``type``.
        arguments: arguments of `ModelSpec.from_sizes` and keys of the section.

    Raises:
        ConfigError: if an argument is unknown, or if a value is invalid.
    """
    sizes = {key: arguments[key] for key in SIZE_ARGUMENTS if key in arguments}
    options = {key: value for key, value in arguments.items() if key not in SIZE_ARGUMENTS}
    settings = {**defaults, **options}
    # Check for unknown arguments here, because this message can suggest names of both groups of arguments.
    for key in settings:
        if key not in section_class.model_fields:
            names = [*SIZE_ARGUMENTS, *section_class.model_fields]
            raise ConfigError(f"model.type {defaults['type']}: {key}: unknown argument{did_you_mean(key, names)}")
    try:
        section = section_class.model_validate(settings)
    except ValidationError as error:
        problems = []
        for detail in error.errors():
            key = ".".join(str(component) for component in detail["loc"])
            problems.append(f"model.{key}: {detail['input']!r}: {detail['msg']}")
        raise ConfigError("; ".join(problems)) from error
    return ModelSpec.from_sizes(**sizes), section
