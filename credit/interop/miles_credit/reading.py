"""Reader of a config of miles-credit: YAML contents, generation, and access to values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from credit.errors import ConfigError
from credit.interop.miles_credit.report import ConversionReport

# Keys in the section ``data`` of generation 1 that generation 2 does not have.
_KEYS_OF_GENERATION_1 = ("variables", "save_loc", "train_years", "surface_variables", "datasets", "data_path")
_NO_VALUE = object()


class MilesConfig:
    """Values of a config of miles-credit, and a record of the keys that the conversion has read.

    Attributes:
        tree: contents of the file.
        generation: 1, or 2 for the nested schema with ``data.source``.
        report: report in which results and errors are recorded.
        read_keys: dotted keys that were read; a key also includes all keys below it.
    """

    def __init__(self, tree: Mapping[str, Any], generation: int, report: ConversionReport) -> None:
        self.tree = tree
        self.generation = generation
        self.report = report
        self.read_keys: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key and record that it was read; `default` if the file does not have the key."""
        node: Any = self.tree
        for name in key.split("."):
            if not isinstance(node, Mapping) or name not in node:
                return default
            node = node[name]
        self.read_keys.add(key)
        return node

    def has(self, key: str) -> bool:
        """Return True if the original config contains a dotted key, with any value."""
        node: Any = self.tree
        for name in key.split("."):
            if not isinstance(node, Mapping) or name not in node:
                return False
            node = node[name]
        return True

    def get_number(self, key: str, default: float) -> float:
        """Return the value of a dotted key as a number.

        YAML reads ``1e-3`` (without a dot) as a string; such strings are converted to numbers. A value that is not a
        number is recorded as refused, and `default` is returned.
        """
        value = self.get(key, _NO_VALUE)
        if value is _NO_VALUE or value is None:
            return default
        number = to_number(value)
        if number is None:
            self.report.record_refused(key, f"`{value}` is not a number")
            return default
        return number

    def get_integer(self, key: str, default: int) -> int:
        """Return the value of a dotted key as a whole number; the rules are those of `get_number`."""
        number = self.get_number(key, default)
        if number != int(number):
            self.report.record_refused(key, f"`{number}` is not a whole number")
            return default
        return int(number)

    def get_flag(self, key: str, default: bool) -> bool:
        """Return ``bool(value)`` for the value of a dotted key; `default` if the file does not have the key."""
        return bool(self.get(key, default))

    def get_names(self, key: str) -> list[str]:
        """Return the value of a dotted key as a list of names.

        The list is empty for a missing key or null, and has one name for a string. Any other value is recorded as
        refused, and an empty list is returned.
        """
        value = self.get(key)
        if value is None:
            return []
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            self.report.record_refused(key, f"`{value}` is not a list of names")
            return []
        return [str(name) for name in value]

    def get_section(self, key: str) -> Mapping[str, Any]:
        """Return a section and record that it was read; an empty dict for a missing key or null.

        Any other value is recorded as refused, and an empty dict is returned.
        """
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.report.record_refused(key, f"`{value}` is not a section")
            return {}
        return value

    def peek_section(self, key: str) -> Mapping[str, Any]:
        """Return a section without recording that it was read; an empty dict if the section is missing."""
        node: Any = self.tree
        for name in key.split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        return node if isinstance(node, Mapping) else {}

    def is_read(self, key: str) -> bool:
        """Return True if `get` or `get_section` has read a key or a section that contains the key."""
        parts = key.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        return any(prefix in self.read_keys for prefix in prefixes)


def to_number(value: Any) -> float | None:
    """Return a number, or the number in a string such as ``"1e-3"``; return None for any other value."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def read_yaml_tree(path: Path) -> dict[str, Any]:
    """Return the contents of a YAML file; all keys are converted to strings.

    In contrast to a config of this package, the file may contain a key twice. As in miles-credit, the last value is
    used.

    Raises:
        ConfigError: if the file cannot be read, is not YAML, or is not a mapping of sections.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: cannot be read ({error}); name a YAML file of miles-credit") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path}: must be a mapping of sections; name a YAML file of miles-credit")
    return _convert_keys_to_strings(tree)


def _convert_keys_to_strings(value: Any) -> Any:
    """Return a copy of nested data with all keys as strings; a section with a YAML anchor is copied at each use."""
    if isinstance(value, Mapping):
        return {str(key): _convert_keys_to_strings(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_convert_keys_to_strings(item) for item in value]
    return value


def find_generation(tree: Mapping[str, Any]) -> int | None:
    """Return the generation of a config of miles-credit; None if the file is not a config of miles-credit.

    Args:
        tree: contents of the file.
    """
    data = tree.get("data")
    if not isinstance(data, Mapping):
        return None
    if "source" in data:
        return 2
    # Configs of this package also have `data.variables`, but as a section.
    if any(key in data for key in _KEYS_OF_GENERATION_1) and not isinstance(data.get("variables"), Mapping):
        return 1
    return None


def iterate_leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for all values in nested data; an empty section is also a value.

    Args:
        tree: nested data.
        prefix: dotted key of `tree`, with a dot at its end; empty for the whole config.
    """
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from iterate_leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
