"""Row of the table of miles-credit keys, and the possible results of the conversion of a key (dispositions)."""

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
    """Result of the conversion of a key.

    Attributes:
        MAPPED: the value is kept, or written in a different form.
        DERIVED: other values are computed from the key.
        IGNORED: the key needs no counterpart in this package.
        REFUSED: the key has no counterpart, and the config is not converted.
    """

    MAPPED = "mapped"
    DERIVED = "derived"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True)
class KeyRow:
    """Row of the table of miles-credit keys: a key, or a pattern of keys, and the result of its conversion.

    Attributes:
        generations: generations of configs that have the key: "1", "2" or "12" (both).
        path: dotted key, with `ANY_NAME`, `ANY_VARIABLE` and `SUBTREE` as wildcards.
        disposition: result of the conversion of the key.
        text: for a mapped or derived key, the keys of this package, in Markdown; for an ignored or
            refused key, the reason.
        harmless_values: for a refused key, the values with which it has no effect. With such a value, the key is
            ignored.
    """

    generations: str
    path: str
    disposition: Disposition
    text: str
    harmless_values: tuple[Any, ...] = ()

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """Parts of the path between the dots."""
        return tuple(self.path.split("."))


def mapped_rows(generations: str, paths: str, text: str) -> list[KeyRow]:
    """Return one row for each key in `paths`, with the result `Disposition.MAPPED`.

    Args:
        generations: generations of configs that have the keys, see `KeyRow`.
        paths: dotted keys, separated by spaces; each key gets a row.
        text: corresponding keys of this package, in Markdown.
    """
    return [KeyRow(generations, path, Disposition.MAPPED, text) for path in paths.split()]


def derived_rows(generations: str, paths: str, text: str) -> list[KeyRow]:
    """Return one row for each key in `paths`, with the result `Disposition.DERIVED`.

    For the arguments see `mapped_rows`.
    """
    return [KeyRow(generations, path, Disposition.DERIVED, text) for path in paths.split()]


def ignored_rows(generations: str, paths: str, reason: str) -> list[KeyRow]:
    """Return one row for each key in `paths`, with the result `Disposition.IGNORED`.

    Args:
        generations: generations of configs that have the keys, see `KeyRow`.
        paths: dotted keys, separated by spaces; each key gets a row.
        reason: reason why the keys need no counterpart.
    """
    return [KeyRow(generations, path, Disposition.IGNORED, reason) for path in paths.split()]


def refused_rows(generations: str, paths: str, reason: str, harmless_values: tuple[Any, ...] = ()) -> list[KeyRow]:
    """Return one row for each key in `paths`, with the result `Disposition.REFUSED`.

    Args:
        generations: generations of configs that have the keys, see `KeyRow`.
        paths: dotted keys, separated by spaces; each key gets a row.
        reason: reason why there is no counterpart, and a remedy if there is one.
        harmless_values: values with which the keys have no effect.
    """
    return [KeyRow(generations, path, Disposition.REFUSED, reason, harmless_values) for path in paths.split()]
