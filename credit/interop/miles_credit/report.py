"""Report of a conversion: the result of each key, and values that are derived from hidden defaults.

A hidden default is a value that miles-credit uses for a key that the original config does not contain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from credit.interop.miles_credit.keys.row import Disposition

_TITLES = {
    Disposition.MAPPED: "Mapped: the value is kept, or written in a different form",
    Disposition.DERIVED: "Derived: check these values",
    Disposition.IGNORED: "Ignored: safe to ignore, for the reason in the table",
    Disposition.REFUSED: "Refused",
}
# Maximum number of characters of a value in the report.
_MAX_VALUE_LENGTH = 60
# Value that marks a key that the file does not have. None is not used, because it is the value null.
_NO_VALUE = object()


@dataclass(frozen=True)
class ReportEntry:
    """Result of the conversion of one key.

    Attributes:
        disposition: result of the conversion: mapped, derived, ignored or refused.
        text: key of this package, or the reason for the result.
        value: value in the original config, as a string; empty if the config does not contain the key.
    """

    disposition: Disposition
    text: str
    value: str


@dataclass
class ConversionReport:
    """Results of all keys of one config.

    Attributes:
        entries: dotted key -> result of its conversion. The result "refused" is never replaced.
        import_obstacles: reasons why weights that were trained with this config cannot be imported. A new training run
            is still possible.
        explicit_keys: derived keys whose entry describes the value in this config, not the general rule for the key.
    """

    entries: dict[str, ReportEntry] = field(default_factory=dict)
    import_obstacles: list[str] = field(default_factory=list)
    explicit_keys: set[str] = field(default_factory=set)

    def add(self, disposition: Disposition, key: str, text: str, value: Any = _NO_VALUE) -> None:
        """Record the result of a key; a result "refused" is not replaced with a later result.

        Args:
            disposition: result of the conversion.
            key: dotted key of the original config.
            text: key of this package, or the reason for the result.
            value: value in the original config; if it is omitted, the value of the previous result is kept.
        """
        previous = self.entries.get(key)
        if previous is not None and previous.disposition is Disposition.REFUSED:
            return
        shown_value = ""
        if value is not _NO_VALUE:
            shown_value = _shorten("null" if value is None else value)
        if previous is not None and not shown_value:
            shown_value = previous.value
        self.entries[key] = ReportEntry(disposition, text, shown_value)

    def record_derived(self, key: str, text: str) -> None:
        """Record a value that is derived from a key, or from the default of miles-credit if the file lacks the key."""
        self.explicit_keys.add(key)
        self.add(Disposition.DERIVED, key, text)

    def record_refused(self, key: str, reason: str) -> None:
        """Record a key that prevents the conversion."""
        self.add(Disposition.REFUSED, key, reason)

    def keys_with(self, disposition: Disposition) -> list[str]:
        """Return the keys with a disposition, in the order in which they were recorded."""
        return [key for key, entry in self.entries.items() if entry.disposition is disposition]

    def describe_refused(self) -> str:
        """Return a text with one line for each refused key."""
        lines = []
        for key in self.keys_with(Disposition.REFUSED):
            lines.append(f"  - {key}: {self.entries[key].text}")
        return "\n".join(lines)

    def describe_derived(self) -> str:
        """Return a text with one line for each derived value that the user should check, approximate values last."""
        lines = []
        approximations = []
        for key in self.keys_with(Disposition.DERIVED):
            line = f"  {key}: {self.entries[key].text}"
            if self.entries[key].text.startswith("approximate"):
                approximations.append(line)
            elif key in self.explicit_keys:
                lines.append(line)
        return "\n".join([*lines, *approximations])

    def to_markdown(self, origin: str, generation: int) -> str:
        """Return the whole report in Markdown.

        Args:
            origin: path of the converted file.
            generation: generation of the config, 1 or 2.
        """
        lines = [
            f"# Conversion of {origin}",
            "",
            f"A config of miles-credit, generation {generation}.",
            "Each key of the file is listed once; `(default)` marks a hidden default that the file does not contain.",
        ]
        for disposition, title in _TITLES.items():
            keys = self.keys_with(disposition)
            if not keys:
                continue
            lines += ["", f"## {title}", "", "| key | value | result |", "|---|---|---|"]
            for key in keys:
                entry = self.entries[key]
                value = "(default)"
                if entry.value:
                    value = f"`{entry.value}`"
                lines.append(f"| `{key}` | {value} | {entry.text.replace('|', '/')} |")
        if self.import_obstacles:
            lines += ["", "## Weights of this config cannot be imported", ""]
            lines += [f"- {reason}" for reason in self.import_obstacles]
        return "\n".join(lines) + "\n"

    def count(self) -> Mapping[str, int]:
        """Return the number of keys for each result of a conversion (mapped, derived, ignored or refused)."""
        return {disposition.value: len(self.keys_with(disposition)) for disposition in Disposition}


def _shorten(value: Any) -> str:
    """Return a value as a string of limited length, without characters that would end a cell of a Markdown table."""
    text = str(value).replace("|", "/").replace("`", "'").replace("\n", " ")
    if len(text) > _MAX_VALUE_LENGTH:
        return text[: _MAX_VALUE_LENGTH - 3] + "..."
    return text
