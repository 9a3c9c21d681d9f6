"""Draft of a config of this package, with comments, and its conversion to YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


class ConfigDraft:
    """Nested values of a converted config before it is written as YAML, with comments.

    Attributes:
        values: contents of the config.
        comments: dotted key -> comment, which is written after the key.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.comments: dict[str, str] = {}

    def set(self, key: str, value: Any, comment: str = "") -> None:
        """Set the value of a dotted key; missing sections are added.

        Each dot separates a section from a key in it. Names of variables may contain dots, so options of variables are
        set with `set_option`.
        """
        *sections, name = key.split(".")
        node = self.values
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
        if comment:
            self.comments[key] = comment

    def set_option(self, variable: str, option: str, value: Any, comment: str = "") -> None:
        """Set an option of a variable in `data.variable_options`."""
        options = self.values.setdefault("data", {}).setdefault("variable_options", {})
        options.setdefault(variable, {})[option] = value
        if comment:
            self.comments[f"data.variable_options.{variable}"] = comment

    def to_yaml(self, header: str) -> str:
        """Return the draft as the contents of a YAML file.

        Args:
            header: comment at the top of the file, without comment signs.
        """
        lines = [f"# {line}".rstrip() for line in header.splitlines()]
        for name, value in self.values.items():
            if isinstance(value, Mapping):
                lines.append("")
            lines += self._format(name, value, name, indent=0)
        return "\n".join(lines) + "\n"

    def _format(self, name: str, value: Any, key: str, indent: int) -> list[str]:
        """Return the YAML lines of a key: sections and lists of sections over several lines, other values on one line.

        Args:
            name: last part of the key.
            value: value of the key.
            key: dotted key.
            indent: depth of the key.
        """
        margin = "  " * indent
        comment = self.comments.get(key)
        suffix = f"  # {comment}" if comment else ""
        # The options of a variable are short, so they are written on a single line.
        is_option = key.startswith("data.variable_options.") or key.startswith("data.transforms.")
        if isinstance(value, Mapping) and value and not is_option:
            lines = [f"{margin}{format_inline(name)}:{suffix}"]
            for child_name, child in value.items():
                lines += self._format(child_name, child, f"{key}.{child_name}", indent + 1)
            return lines
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            lines = [f"{margin}{format_inline(name)}:{suffix}"]
            lines += [f"{margin}  - {format_inline(item)}" for item in value]
            return lines
        return [f"{margin}{format_inline(name)}: {format_inline(value)}{suffix}"]


def format_inline(value: Any) -> str:
    """Return a value as YAML on a single line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    # After a scalar, yaml appends the mark of the end of a document.
    return text.removesuffix("\n").removesuffix("\n...")
