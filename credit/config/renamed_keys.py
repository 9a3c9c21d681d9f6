"""Handling of config keys of earlier versions: old names are replaced, and former keys without effect are removed.

An old name in a config file or an override is accepted with a warning until version `REMOVED_IN`. In files that the
package has saved (the config in a run folder, checkpoints, training stores), old names are always replaced, without a
warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from credit.config.registry import LOSSES
from credit.errors import ConfigError

# Dotted old key -> dotted new key in the same section. If a section is renamed, the table lists the renamed keys in it
# before the section. The old names of these keys begin with the old name of the section, and the new names begin with
# its new name.
RENAMED_KEYS = {
    "data.bad_times": "data.on_bad_time",
    "data.fields": "data.variable_options",
    "model.post": "model.postprocess",
    "trainer.early_view": "trainer.preview",
    "trainer.tensorboard": "trainer.loggers",
    "inference.ensemble.noise.where": "inference.ensemble.feature_noise.blocks",
    "inference.ensemble.noise": "inference.ensemble.feature_noise",
}
# Old key with the values true and false -> values of the new key that replace true and false.
_NEW_VALUES: dict[str, dict[bool, Any]] = {"trainer.tensorboard": {True: ["tensorboard"], False: []}}
# Keys that every loss had until version 0.15, with their defaults. With the default value, a key had no effect.
_FORMER_LOSS_DEFAULTS = {"huber_delta": 1.0, "global_mean": 0.0}
# First version in which old keys in config files and overrides of a user are an error.
REMOVED_IN = "1.0"


def rename_keys(raw: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], list[str]]:
    """Replace the old keys of a config with their new names.

    Args:
        raw: a config, not yet validated; it is not changed.
        origin: file from which the config was read, for the message.

    Returns:
        A copy of the config with new names, and the dotted old keys that were replaced.

    Raises:
        ConfigError: if the config contains both the old name and the new name of a key.
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
            raise ConfigError(f"{origin}: {old_key} is the old name of {new_key}, and both are set; remove {old_key}")
        # Build the section again, so that the order of its keys does not change.
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
    """Return the section at a path of keys; an empty mapping if there is no section."""
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
    """Return a config without former keys of ``loss`` that had no effect.

    Every loss had these keys in earlier versions. A key is removed if the kind of loss no longer has the key and the
    value is the former default. Call this function after the plugins are imported, because they register further kinds
    of losses.

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
        # Keep a former key that had an effect, so that the validation reports it.
        if name in keys or not had_no_effect:
            remaining[name] = value
    return {**raw, "loss": remaining}


def find_old_key(key: str) -> str | None:
    """Return the old key to which a dotted key belongs; None if there is none.

    The old key is the dotted key itself, or a section that contains the dotted key.
    """
    for old_key in RENAMED_KEYS:
        if key == old_key or key.startswith(f"{old_key}."):
            return old_key
    return None


def rename_dotted_key(key: str) -> str:
    """Replace an old key in a dotted key with its new name; return any other key unchanged."""
    old_key = find_old_key(key)
    if old_key is None:
        return key
    return RENAMED_KEYS[old_key] + key.removeprefix(old_key)


def convert_value(old_key: str, value: Any) -> Any:
    """Convert a value of an old key to the equivalent value of the new key.

    Most keys have the same values under both names. An invalid value is returned unchanged, so that the validation
    reports it.

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
        text: an override; an override without an old key is returned unchanged.
    """
    key, equals, value = text.partition("=")
    old_key = find_old_key(key)
    if old_key in _NEW_VALUES and value.strip().lower() in ("true", "false"):
        value = str(convert_value(old_key, value.strip().lower() == "true"))
    return f"{rename_dotted_key(key)}{equals}{value}"


def describe_renamed(old_key: str, origin: str) -> str:
    """Return the warning about an old key in a config or an override of a user.

    Args:
        old_key: dotted key, one of `RENAMED_KEYS`.
        origin: file or override with the key.
    """
    return (
        f"{origin}: the key {old_key} is now called {RENAMED_KEYS[old_key]}; rename it, because the old name will be "
        f"an error in version {REMOVED_IN}"
    )
