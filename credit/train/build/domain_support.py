"""Check that all components of a training run support fields that are divided among ranks."""

from __future__ import annotations

from credit.config import Config
from credit.config.registry import OBJECTIVES, POSTPROCESSES
from credit.errors import ConfigError
from credit.metrics import find_metric_class
from credit.parallel.domain.domain import allows_divided_fields


def require_domain_support(config: Config) -> None:
    """Raise ConfigError if the ranks divide the fields of a sample, but a configured component needs complete fields.

    The settings of the trainer, the objective, the post-processes and the metrics are checked.

    Raises:
        ConfigError: the message names the config key and the kind of the component.
    """
    if not config.trainer.parallelism.divides_fields:
        return
    try:
        config.trainer.require_divisible_fields()
    except ValueError as error:
        raise ConfigError(f"trainer.{error}") from error
    # key and kind -> class
    classes: dict[tuple[str, str], type] = {}
    kind = config.trainer.objective.kind
    classes["trainer.objective.kind", kind] = OBJECTIVES.find_class(kind)
    for key, section in config.model.postprocess_entries.items():
        classes[key, section.kind] = POSTPROCESSES.find_class(section.kind)
    for name in config.trainer.metrics:
        classes["trainer.metrics", name] = find_metric_class(name)
    for (key, kind), cls in classes.items():
        if not allows_divided_fields(cls):
            raise ConfigError(
                f"{key}: {kind} does not support domain parallelism (supports_domain); remove it, or set "
                "trainer.parallelism.domain to 1 and sequence_parallel to false"
            )
