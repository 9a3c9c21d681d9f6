"""Config keys of earlier versions: their old names are still read, and keys without an effect are left out.

Where a user writes them, in a config file or an override, an old name is accepted with a warning until version
`REMOVED_IN`. In what the package has saved (the config in a run's folder, checkpoints, training stores) it is replaced
silently and without a time limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from credit.config.registry import LOSSES
from credit.errors import ConfigError

# Dotted old key -> dotted new key. Both lie in the same section, at any depth. A key below a renamed section precedes
# that section; its old name begins with the section's old name, its new name with the new one.
RENAMED_KEYS = {
    "data.bad_times": "data.on_bad_time",
    "data.fields": "data.variable_options",
    "model.post": "model.postprocess",
    "trainer.early_view": "trainer.preview",
    "inference.ensemble.noise.where": "inference.ensemble.feature_noise.blocks",
    "inference.ensemble.noise": "inference.ensemble.feature_noise",
}
# Until 0.15 every loss had these keys; now each kind has its own. At these defaults they had no effect.
_FORMER_LOSS_DEFAULTS = {"huber_delta": 1.0, "global_mean": 0.0}
# The first version that refuses the old keys in what a user writes.
REMOVED_IN = "0.17"


def rename_keys(raw: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], list[str]]:
    """Return a config with old keys replaced by new ones, and the old keys that it had.

    Args:
        raw: a config, not yet validated.
        origin: the file that it comes from, for the message.

    Returns:
        The config with new keys, and the old keys that were in it.

    Raises:
        ConfigError: where an old key and its new name are both given.
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
        renamed_section = {new_name if name == old_name else name: value for name, value in section.items()}
        renamed = _replace_section(renamed, section_path, renamed_section)
        old_keys.append(old_key)
    return renamed, old_keys


def _find_section(raw: Mapping[str, Any], section_path: Sequence[str]) -> Mapping[str, Any]:
    """Return the section at a path of keys, an empty one if there is none or its place holds another value."""
    section: Any = raw
    for name in section_path:
        section = section.get(name)
        if not isinstance(section, Mapping):
            return {}
    return section


def _replace_section(raw: Mapping[str, Any], section_path: Sequence[str], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config with another section at a path of keys; `raw` itself is not changed."""
    if not section_path:
        return dict(section)
    name, *path_below = section_path
    return {**raw, name: _replace_section(raw[name], path_below, section)}


def drop_former_loss_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the keys of `loss` that its kind no longer has and that are at their former defaults.

    Call this after the plugins are imported, which register their kinds.

    Args:
        raw: the whole config, not yet validated.
    """
    section = raw.get("loss")
    if not isinstance(section, Mapping) or section.get("kind") not in LOSSES.names():
        return dict(raw)
    keys = LOSSES.find_section(section["kind"]).model_fields
    remaining = {}
    for name, value in section.items():
        if name in keys or name not in _FORMER_LOSS_DEFAULTS or value != _FORMER_LOSS_DEFAULTS[name]:
            remaining[name] = value
    return {**raw, "loss": remaining}


def find_old_key(key: str) -> str | None:
    """Return the old key that a dotted key is or lies below, None where there is none."""
    for old_key in RENAMED_KEYS:
        if key == old_key or key.startswith(f"{old_key}."):
            return old_key
    return None


def rename_dotted_key(key: str) -> str:
    """Return a dotted key with its new name, where it is an old key or lies below one."""
    old_key = find_old_key(key)
    if old_key is None:
        return key
    return RENAMED_KEYS[old_key] + key.removeprefix(old_key)


def describe_renamed(old_key: str, origin: str) -> str:
    """Return the warning about an old key that a user has written."""
    return (
        f"{origin}: the key {old_key} is now called {RENAMED_KEYS[old_key]}; rename it, because version {REMOVED_IN} "
        "will refuse the old name"
    )
