"""Choice of the weights that a run trains, and of a learning rate for each (``trainer.learning_rate_factors``).

Lower rates for the first blocks of a network, or frozen blocks, keep what a network has learnt from much data while it
is fine-tuned on little (discriminative fine-tuning, Howard and Ruder 2018, arXiv 1801.06146).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from credit.config.sections.trainer import TrainerConfig
from credit.errors import ConfigError, did_you_mean
from credit.models.lora import apply_lora
from credit.parallel.blocks.marks import strip_wrapper_prefixes

# torch keeps a parametrized weight, such as one with spectral norm, under this name.
_PARAMETRIZED_WEIGHT = ".parametrizations.weight.original"


def select_trained_weights(model: nn.Module, trainer: TrainerConfig) -> None:
    """Add adapters to a model and freeze weights, in place, as the config says.

    Args:
        model: the model, on any device; neither wrapped nor sharded yet.
        trainer: section ``trainer`` of the config.

    Raises:
        ConfigError: if a pattern of ``lora.targets`` or ``learning_rate_factors`` matches nothing, or if no weight is
            left to train.
    """
    if trainer.lora is not None:
        apply_lora(model, trainer.lora.targets, trainer.lora.rank, trainer.lora.alpha)
    freeze_weights(model, trainer.learning_rate_factors)


def freeze_weights(model: nn.Module, factors: Mapping[str, float]) -> None:
    """Freeze the weights whose learning rate has the factor 0, in place.

    Args:
        model: the model, on any device; neither wrapped nor sharded yet.
        factors: pattern -> factor, see `find_learning_rate_factors`.

    Raises:
        ConfigError: if a pattern matches nothing, or if no weight is left to train.
    """
    factor_by_name = find_learning_rate_factors(model, factors)
    for name, parameter in model.named_parameters():
        if factor_by_name[name] == 0:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"trainer.learning_rate_factors: {dict(factors)} leaves no weight to train; give a pattern a factor above 0"
        )


def find_learning_rate_factors(model: nn.Module, factors: Mapping[str, float]) -> dict[str, float]:
    """Return the factor on the learning rate of each parameter of a model, by the parameter's name.

    A pattern is the path of a module or weight, in which ``*`` stands for any text; it also matches everything below a
    module. The first pattern that matches a parameter counts. A parameter without a pattern has the factor 1.

    Args:
        model: the model; it may be wrapped and sharded.
        factors: pattern -> factor; 0 for weights that are not trained.

    Raises:
        ConfigError: if a pattern matches no parameter, or only parameters that earlier patterns match.
    """
    paths = {name: _find_path(name) for name, _ in model.named_parameters()}
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
            _refuse_pattern(pattern, paths.values(), type(model).__name__)
    return factor_by_name


def _find_path(name: str) -> str:
    """Return the path of a parameter as a user writes it, without the names that wrappers and parametrizations add."""
    return strip_wrapper_prefixes(name).replace(_PARAMETRIZED_WEIGHT, ".weight")


def _matches(path: str, pattern: str) -> bool:
    """Return True if a pattern matches the path of a parameter, or of a module that contains it."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _refuse_pattern(pattern: str, paths: Iterable[str], model_name: str) -> None:
    """Refuse a pattern that decides on no parameter.

    Args:
        pattern: the pattern.
        paths: path of each parameter.
        model_name: name of the model's class, for the message.

    Raises:
        ConfigError: always; the message says why the pattern has no effect.
    """
    prefixes = set()
    for path in paths:
        if _matches(path, pattern):
            raise ConfigError(
                f"trainer.learning_rate_factors: earlier patterns match all weights that {pattern!r} matches; as the "
                "first pattern counts, move it before them"
            )
        names = path.split(".")
        prefixes.update(".".join(names[:length]) for length in range(1, len(names) + 1))
    raise ConfigError(
        f"trainer.learning_rate_factors: {pattern!r} matches no weight of {model_name}{did_you_mean(pattern, prefixes)}"
    )
