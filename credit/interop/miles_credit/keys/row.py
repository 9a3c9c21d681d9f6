"""Row of the table of keys, and the possible dispositions (results) of a key."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

# Segment of a path that matches any name, such as the name of a source or of a preblock.
ANY_NAME = "NAME"
# Segment of a path that matches only the names of variables in the config.
ANY_VARIABLE = "VARIABLE"
# Last segment of a path that matches the key before it and all keys below that key.
SUBTREE = "*"


class Disposition(Enum):
    """Result of the conversion of a key."""

    MAPPED = "mapped"
    DERIVED = "derived"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True)
class KeyRow:
    """Row of the table of keys.

    Attributes:
        generations: generations of configs that have the key: "1", "2" or "12" (both).
        path: dotted key, with `ANY_NAME`, `ANY_VARIABLE` and `SUBTREE` as wildcards.
        disposition: result of the conversion of the key.
        text: for a mapped or derived key, the keys of this package, in Markdown; otherwise the reason.
        harmless: for a refused key, the values with which it has no effect. With such a value, the key is ignored.
    """

    generations: str
    path: str
    disposition: Disposition
    text: str
    harmless: tuple[Any, ...] = ()

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """Parts of the path between the dots."""
        return tuple(self.path.split("."))


def mapped(generations: str, paths: str, text: str) -> list[KeyRow]:
    """Return rows of mapped keys, whose values are kept or written in a different form.

    Args:
        generations: generations of configs that have the keys, see `KeyRow`.
        paths: dotted keys, separated by spaces; each key gets a row.
        text: corresponding keys of this package, in Markdown.
    """
    return [KeyRow(generations, path, Disposition.MAPPED, text) for path in paths.split()]


def derived(generations: str, paths: str, text: str) -> list[KeyRow]:
    """Return rows of derived keys, from which other values are computed; for the arguments see `mapped`."""
    return [KeyRow(generations, path, Disposition.DERIVED, text) for path in paths.split()]


def ignored(generations: str, paths: str, reason: str) -> list[KeyRow]:
    """Return rows of keys that can be ignored safely.

    Args:
        generations: generations of configs that have the keys, see `KeyRow`.
        paths: dotted keys, separated by spaces; each key gets a row.
        reason: reason why the keys need no counterpart.
    """
    return [KeyRow(generations, path, Disposition.IGNORED, reason) for path in paths.split()]


def refused(generations: str, paths: str, reason: str, harmless: tuple[Any, ...] = ()) -> list[KeyRow]:
    """Return rows of keys without a counterpart, which prevent a conversion.

    Args:
        generations: generations of configs that have the keys, see `KeyRow`.
        paths: dotted keys, separated by spaces; each key gets a row.
        reason: reason why there is no counterpart, and a remedy if there is one.
        harmless: values with which the keys have no effect.
    """
    return [KeyRow(generations, path, Disposition.REFUSED, reason, harmless) for path in paths.split()]
