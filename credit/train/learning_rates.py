"""Selection of the weights that a run trains, and factors on their learning rates (``trainer.learning_rate_factors``).

If a network that was trained on much data is fine-tuned on little data, frozen blocks or lower rates in the first
blocks preserve the trained weights (discriminative fine-tuning, Howard and Ruder 2018, arXiv 1801.06146).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from credit.config.sections.trainer import TrainerConfig
from credit.errors import ConfigError, did_you_mean
from credit.models.lora import apply_lora
from credit.parallel.blocks.marks import strip_wrapper_prefixes

# Suffix that torch adds to the name of a parametrized weight, such as a weight with spectral norm.
_PARAMETRIZED_WEIGHT = ".parametrizations.weight.original"


def select_trained_weights(model: nn.Module, trainer: TrainerConfig) -> None:
    """Add the adapters of ``trainer.lora`` to a model, and freeze weights by ``trainer.learning_rate_factors``.

    Args:
        model: the model, on any device, before wrapping and sharding; it is changed in place.
        trainer: section ``trainer`` of the config.

    Raises:
        ConfigError: if a pattern of ``lora.targets`` or ``learning_rate_factors`` matches nothing, or if all weights
            are frozen.
    """
    if trainer.lora is not None:
        apply_lora(model, trainer.lora.targets, trainer.lora.rank, trainer.lora.alpha)
    freeze_weights(model, trainer.learning_rate_factors)


def freeze_weights(model: nn.Module, factors: Mapping[str, float]) -> None:
    """Freeze the weights whose learning rate has the factor 0.

    Args:
        model: the model, on any device, before wrapping and sharding; it is changed in place.
        factors: pattern -> factor, see `find_learning_rate_factors`.

    Raises:
        ConfigError: if a pattern matches nothing, or if all weights are frozen.
    """
    factor_by_name = find_learning_rate_factors(model, factors)
    for name, parameter in model.named_parameters():
        if factor_by_name[name] == 0:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"trainer.learning_rate_factors: {dict(factors)} freezes all weights; set a factor above 0 for some pattern"
        )


def find_learning_rate_factors(model: nn.Module, factors: Mapping[str, float]) -> dict[str, float]:
    """Return the factor on the learning rate of each parameter of a model: name of the parameter -> factor.

    A pattern is the path of a module or weight, in which ``*`` matches any characters. The path of a module also
    matches all weights inside the module. If several patterns match a parameter, the first pattern applies. If no
    pattern matches a parameter, its factor is 1.

    Args:
        model: the model; it may be wrapped and sharded.
        factors: pattern -> factor; the factor 0 freezes weights.

    Raises:
        ConfigError: if a pattern matches no parameter, or only parameters that earlier patterns match.
    """
    paths = {name: _strip_added_names(name) for name, _ in model.named_parameters()}
    factor_by_name = {}
    used_patterns = set()
    for name, path in paths.items():
        factor_by_name[name] = 1.0
        for pattern, factor in factors.items():
            if _matches(path, pattern):
                factor_by_name[name] = factor
                used_patterns.add(pattern)
                break
    for pattern in factors:
        if pattern not in used_patterns:
            _raise_for_unused_pattern(pattern, paths.values(), type(model).__name__)
    return factor_by_name


def _strip_added_names(name: str) -> str:
    """Return the path of a parameter as in the config: its name without the parts that wrappers and torch add."""
    return strip_wrapper_prefixes(name).replace(_PARAMETRIZED_WEIGHT, ".weight")


def _matches(path: str, pattern: str) -> bool:
    """Return True if a pattern matches the path of a parameter, or of a module that contains it."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _raise_for_unused_pattern(pattern: str, paths: Iterable[str], model_name: str) -> None:
    """Raise ConfigError for a pattern that determines the factor of no parameter.

    Args:
        pattern: the pattern.
        paths: path of each parameter.
        model_name: name of the model's class, for the message.

    Raises:
        ConfigError: always; the message explains why the pattern has no effect.
    """
    prefixes = set()
    for path in paths:
        if _matches(path, pattern):
            raise ConfigError(
                f"trainer.learning_rate_factors: earlier patterns match all weights that {pattern!r} matches. The "
                "first matching pattern applies, so move this pattern before the earlier patterns"
            )
        names = path.split(".")
        prefixes.update(".".join(names[:length]) for length in range(1, len(names) + 1))
    raise ConfigError(
        f"trainer.learning_rate_factors: {pattern!r} matches no weight of {model_name}{did_you_mean(pattern, prefixes)}"
    )
