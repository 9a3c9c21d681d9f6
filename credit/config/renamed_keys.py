"""Config keys of earlier versions: old names are replaced, and former keys without an effect are left out.

An old name in a config file or an override is accepted with a warning until version `REMOVED_IN`. In files that the
package has saved (the config in a run's folder, checkpoints, training stores), old names are replaced silently and
without a time limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from credit.config.registry import LOSSES
from credit.errors import ConfigError

# Dotted old key -> dotted new key in the same section. If a section is renamed, the table lists the renamed keys below
# it before the section itself. Their old names begin with the old name of the section, their new names with the new
# one.
RENAMED_KEYS = {
    "data.bad_times": "data.on_bad_time",
    "data.fields": "data.variable_options",
    "model.post": "model.postprocess",
    "trainer.early_view": "trainer.preview",
    "trainer.tensorboard": "trainer.loggers",
    "inference.ensemble.noise.where": "inference.ensemble.feature_noise.blocks",
    "inference.ensemble.noise": "inference.ensemble.feature_noise",
}
# Old key with the values true and false -> the values of the new key that replace true and false.
_NEW_VALUES: dict[str, dict[bool, Any]] = {"trainer.tensorboard": {True: ["tensorboard"], False: []}}
# Keys that every loss had until version 0.15, with their defaults, at which they had no effect.
_FORMER_LOSS_DEFAULTS = {"huber_delta": 1.0, "global_mean": 0.0}
# The first version that refuses the old keys in config files and overrides of a user.
REMOVED_IN = "1.0"


def rename_keys(raw: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], list[str]]:
    """Replace the old keys of a config by their new names.

    Args:
        raw: a config, not yet validated; it is not changed.
        origin: file that the config comes from, for the message.

    Returns:
        A copy of the config with new names, and the dotted old keys that were replaced.

    Raises:
        ConfigError: if the config has a key under its old name and its new name.
    """
    renamed = dict(raw)
    old_keys = []
    for old_key, new_key in RENAMED_KEYS.items():
        *section_path, old_name = old_key.split(".")
        new_name = new_key.rpartition(".")[2]
        section = _find_section(renamed, section_path)
        if old_name not in section:
            continue
        if new_name in section:
            raise ConfigError(f"{origin}: {old_key} is the old name of {new_key}, and both are given; remove {old_key}")
        # Rebuild the section, so that its keys keep their order.
        renamed_section = {}
        for name, value in section.items():
            if name == old_name:
                renamed_section[new_name] = convert_value(old_key, value)
            else:
                renamed_section[name] = value
        renamed = _replace_section(renamed, section_path, renamed_section)
        old_keys.append(old_key)
    return renamed, old_keys


def _find_section(raw: Mapping[str, Any], section_path: Sequence[str]) -> Mapping[str, Any]:
    """Return the section at a path of keys; an empty mapping if no section is there."""
    section: Any = raw
    for name in section_path:
        section = section.get(name)
        if not isinstance(section, Mapping):
            return {}
    return section


def _replace_section(raw: Mapping[str, Any], section_path: Sequence[str], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config in which `section` replaces the section at a path of keys; `raw` is not changed."""
    if not section_path:
        return dict(section)
    name, *path_below = section_path
    return {**raw, name: _replace_section(raw[name], path_below, section)}


def drop_former_loss_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the former keys of ``loss`` that had no effect.

    Every loss had these keys in earlier versions. A key is left out if the kind of loss no longer has it and its value
    is the former default.
    Call this after importing the plugins, because they register further kinds of losses.

    Args:
        raw: the whole config, not yet validated.
    """
    section = raw.get("loss")
    if not isinstance(section, Mapping) or section.get("kind") not in LOSSES.names():
        return dict(raw)
    keys = LOSSES.find_section(section["kind"]).model_fields
    remaining = {}
    for name, value in section.items():
        had_no_effect = name in _FORMER_LOSS_DEFAULTS and value == _FORMER_LOSS_DEFAULTS[name]
        # A former key with an effect stays, so that the validation reports it.
        if name in keys or not had_no_effect:
            remaining[name] = value
    return {**raw, "loss": remaining}


def find_old_key(key: str) -> str | None:
    """Return the old key that is a dotted key itself or a section that contains it; None if there is none."""
    for old_key in RENAMED_KEYS:
        if key == old_key or key.startswith(f"{old_key}."):
            return old_key
    return None


def rename_dotted_key(key: str) -> str:
    """Return a dotted key in which an old key is replaced by its new name; any other key is returned unchanged."""
    old_key = find_old_key(key)
    if old_key is None:
        return key
    return RENAMED_KEYS[old_key] + key.removeprefix(old_key)


def convert_value(old_key: str, value: Any) -> Any:
    """Return the value of a new key that means the same as a value of its old key.

    Most keys have the same values under both names. A wrong value is returned unchanged, so that the validation reports
    it.

    Args:
        old_key: dotted key, one of `RENAMED_KEYS`.
        value: value of the old key.
    """
    if isinstance(value, bool):
        return _NEW_VALUES.get(old_key, {}).get(value, value)
    return value


def rename_override(text: str) -> str:
    """Return an override ``section.key=value`` with the new name and value of its key.

    Args:
        text: an override; one without an old key is returned unchanged.
    """
    key, equals, value = text.partition("=")
    old_key = find_old_key(key)
    if old_key in _NEW_VALUES and value.strip().lower() in ("true", "false"):
        value = str(convert_value(old_key, value.strip().lower() == "true"))
    return f"{rename_dotted_key(key)}{equals}{value}"


def describe_renamed(old_key: str, origin: str) -> str:
    """Return the warning about an old key that a user has written.

    Args:
        old_key: dotted key, one of `RENAMED_KEYS`.
        origin: file or override with the key.
    """
    return (
        f"{origin}: the key {old_key} is now called {RENAMED_KEYS[old_key]}; rename it, because version {REMOVED_IN} "
        "will refuse the old name"
    )
