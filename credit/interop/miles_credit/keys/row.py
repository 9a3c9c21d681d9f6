"""Row of the table of keys, and the dispositions that a key may have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

# Segment of a path that matches any name, such as that of a source or of a preblock.
ANY_NAME = "NAME"
# Segment of a path that matches only the names of the variables of the config.
ANY_VARIABLE = "VARIABLE"
# Last segment of a path that covers the key before it and everything below that key.
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
        generations: "1", "2" or "12": the generations of configs that have the key.
        path: the dotted key, with `ANY_NAME`, `ANY_VARIABLE` and `SUBTREE` as wildcards.
        disposition: result of the conversion of the key.
        text: for a mapped or derived key, the keys of this package, as Markdown; otherwise the reason.
        harmless: for a refused key, the values at which it has no effect, so that it is ignored.
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
    """Return one row for each of several mapped keys, whose values are kept or written in another form.

    Args:
        generations: as in `KeyRow`.
        paths: dotted keys, separated by spaces.
        text: the keys of this package, as Markdown.
    """
    return [KeyRow(generations, path, Disposition.MAPPED, text) for path in paths.split()]


def derived(generations: str, paths: str, text: str) -> list[KeyRow]:
    """Return one row for each of several keys from which other values follow; the arguments are those of `mapped`."""
    return [KeyRow(generations, path, Disposition.DERIVED, text) for path in paths.split()]


def ignored(generations: str, paths: str, reason: str) -> list[KeyRow]:
    """Return one row for each of several keys that are safe to ignore.

    Args:
        generations: as in `KeyRow`.
        paths: dotted keys, separated by spaces.
        reason: the reason why the key needs no counterpart.
    """
    return [KeyRow(generations, path, Disposition.IGNORED, reason) for path in paths.split()]


def refused(generations: str, paths: str, reason: str, harmless: tuple[Any, ...] = ()) -> list[KeyRow]:
    """Return one row for each of several keys without a counterpart.

    Args:
        generations: as in `KeyRow`.
        paths: dotted keys, separated by spaces.
        reason: the reason, and a remedy if there is one.
        harmless: values at which the keys have no effect.
    """
    return [KeyRow(generations, path, Disposition.REFUSED, reason, harmless) for path in paths.split()]
