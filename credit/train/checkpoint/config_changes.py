"""Comparison of the config of a run with the config in the checkpoint or weights that the run starts with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from credit.channels import ChannelMap
from credit.config import Config, build_config
from credit.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

# Keys that determine the function of the network for given weights. Channels, grid and units are compared in
# `credit.train.checkpoint.trained_fields`.
_FUNCTION_KEYS = ("model", "data.timestep", "data.history_len", "data.solar", "data.transforms")
# Keys that forecasts take from the checkpoint.
_KEYS_FROM_CHECKPOINT = ("model", "data.solar", "data.transforms")
# Keys that must not change during a run.
_RUN_KEYS = (*_FUNCTION_KEYS, "data.splits.train", "trainer.lora", "trainer.optimizer")
# Keys that may always change, because dropout does not change the network in eval mode.
_CHANGEABLE_KEYS = ("model.attn_dropout", "model.ff_dropout")
# Keys that a new run with existing weights may change. New noise does not change the output at first.
EXTENDABLE_KEYS = ("model.noise",)
# Keys that may change during a run without a warning, because they do not influence the trained weights.
_UNIMPORTANT_KEYS = ("data.store", "data.sources", "data.cache", "data.cache_folder", "data.num_workers",
                "data.splits.test", "trainer.resume", "trainer.walltime", "trainer.log_every", "trainer.keep_last",
                "trainer.device", "trainer.loggers", "trainer.checkpoint_every", "trainer.preview",
                # The batches follow from the number of ranks and the global batch size of the checkpoint.
                "trainer.train_batch_size", "trainer.grad_accum_every", "trainer.global_batch_size")  # fmt: skip


def list_extendable_keys(config: Config, trained: ChannelMap) -> tuple[str, ...]:
    """Return the config keys that a new run may change if it starts with the weights of an existing run.

    Args:
        config: the config of the new run; its ``trainer.resume_changes`` may allow further keys.
        trained: the channels of the existing run.
    """
    keys = EXTENDABLE_KEYS
    if "grid" in config.trainer.resume_changes:
        keys += tuple(f"model.{key}" for key in config.model.grid_keys)
    if "channels" in config.trainer.resume_changes:
        trained_variables = {channel.variable for channel in (*trained.input, *trained.output)}
        for channel in (*config.data.channel_map().input, *config.data.channel_map().output):
            if channel.variable not in trained_variables:
                keys += (f"data.transforms.{channel.variable}",)
    return keys


def require_same_run(config: Config, trained: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if a run cannot continue with its current config; log a warning for allowed changes.

    Args:
        config: the current config of the run.
        trained: the config in the checkpoint, as plain values.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: if a key has changed that must not change during a run; the message lists these keys.
    """
    require_same_network_function(config, trained, path, _RUN_KEYS)
    changes = []
    for key, trained_value, value in _list_changes(config, trained):
        concerns_training = key.startswith(("data.", "loss.", "trainer.", "seed"))
        # `require_same_network_function` has checked the keys in _RUN_KEYS, so they are not reported again.
        is_reported = concerns_training and not _is_key_or_below(key, (*_RUN_KEYS, *_UNIMPORTANT_KEYS))
        if is_reported:
            changes.append(f"{key} ({trained_value} before, {value} now)")
    if changes:
        logger.warning("changed since %s was written: %s", path.name, ", ".join(changes))


def warn_of_ignored_changes(config: Config, trained: Mapping[str, Any], path: Path) -> None:
    """Log a warning if a forecast ignores keys of the config, because the weights were trained with other values.

    Args:
        config: the config of the forecast.
        trained: the config in the checkpoint, as plain values.
        path: the checkpoint, for messages.
    """
    changes = []
    for key, trained_value, value in _list_changes(config, trained):
        if _is_key_or_below(key, _KEYS_FROM_CHECKPOINT) and not _is_key_or_below(key, _CHANGEABLE_KEYS):
            changes.append(f"{key} ({trained_value} in the checkpoint, {value} in the config)")
    if changes:
        logger.warning(
            "the forecasts use the model of %s; these keys of the config are ignored, because they need a new training "
            "run: %s",
            path,
            ", ".join(changes),
        )


def require_same_network_function(
    config: Config,
    trained: Mapping[str, Any],
    path: Path,
    fixed_keys: tuple[str, ...] = _FUNCTION_KEYS,
    extendable_keys: tuple[str, ...] = (),
) -> None:
    """Raise CheckpointError if a network of this config would compute a different function with the trained weights.

    Args:
        config: the current config.
        trained: the config in the checkpoint, as plain values.
        path: the checkpoint, for messages.
        fixed_keys: keys that must not have changed, including all keys below them.
        extendable_keys: keys below `fixed_keys` that may change, because the changes only add parameters.

    Raises:
        CheckpointError: if a fixed key has changed; the message lists all such keys with both values.
    """
    changes = []
    advice = "Restore the trained config, or choose a different save_loc"
    for key, trained_value, value in _list_changes(config, trained):
        is_exception = _is_key_or_below(key, (*_CHANGEABLE_KEYS, *extendable_keys))
        if _is_key_or_below(key, fixed_keys) and not is_exception:
            changes.append(f"{key}: {trained_value} in the checkpoint, {value} in the config")
            if _is_key_or_below(key, EXTENDABLE_KEYS):
                advice = (
                    f"Restore the trained config. To change {key}, start a new run with weights of credit convert "
                    "--export"
                )
    if changes:
        raise CheckpointError(
            f"{path}: these weights were trained with a different config: {'; '.join(changes)}. {advice}"
        )


def _list_changes(config: Config, trained: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, value in the checkpoint, current value) for each key with different values."""
    # An earlier version may have written the config. `build_config` renames old keys and adds the defaults of new keys.
    # If it rejects the stored config, the stored values are compared without this conversion.
    trained_values = _flatten(trained)
    with suppress(ConfigError):
        trained_values = _flatten(_dump_comparable(build_config(trained)))
    values = _flatten(_dump_comparable(config))
    changes = []
    for key in sorted(trained_values.keys() | values.keys()):
        if trained_values.get(key) != values.get(key):
            changes.append((key, trained_values.get(key), values.get(key)))
    return changes


def _dump_comparable(config: Config) -> dict[str, Any]:
    """Return a config as plain values; the shorthand `hyperdiffusion` is converted to an entry of `postprocess`."""
    sections = config.model_dump(mode="json")
    for name in ("model", "inference"):
        entries = getattr(config, name).postprocess_entries.values()
        sections[name]["hyperdiffusion"] = None
        sections[name]["postprocess"] = [entry.model_dump(mode="json") for entry in entries]
    return sections


def _is_key_or_below(key: str, prefixes: tuple[str, ...]) -> bool:
    """Return True if a dotted key is one of `prefixes` or in a section below one of them."""
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Return dotted key, such as ``trainer.amp`` -> value, for all values in nested sections.

    Args:
        value: a section, or a single value.
        key: dotted key of `value`; empty for the complete config.
    """
    if not isinstance(value, Mapping):
        return {key: value}
    values = {}
    for name, item in value.items():
        item_key = f"{key}.{name}" if key else name
        values |= _flatten(item, item_key)
    return values
