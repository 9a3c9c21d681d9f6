"""Errors that a user can correct, and a function that finds the nearest valid name for their messages.

A message names the key or file, the value, the rule and a remedy. Any other exception is a bug in this package.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

# Smallest similarity of two similar names. The similarity of `difflib` is twice the number of common letters, divided
# by the number of letters of both names. Names of three letters with one wrong letter have 0.67. Unrelated names such
# as "mode" and "folder" may have up to 0.6 by chance.
_MIN_SIMILARITY = 0.65


class CreditError(Exception):
    """Base class of errors that a user can correct; commands print them without a traceback.

    Attributes:
        exit_code: exit status of a command that ends with this error.
    """

    exit_code = 1


class ConfigError(CreditError):
    """Error for a wrong key, type, range or combination in a config; exit code 2."""

    exit_code = 2


class DataError(CreditError):
    """Error for input data that are missing, unreadable or do not agree with the config; exit code 2."""

    exit_code = 2


class UnavailableError(DataError):
    """Error for input data that a server cannot deliver at present, although they may be correct; exit code 2."""


class CycleError(CreditError):
    """Error for an operational analysis that cannot be used, such as one with a missing record; exit code 3."""

    exit_code = 3


class CheckpointError(CreditError):
    """Error for a checkpoint that is missing, damaged or belongs to a different model; exit code 1."""


def find_nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice with the spelling most similar to `name`; None if no choice is similar enough."""
    names = sorted({str(choice) for choice in choices})
    # All similar names are candidates. `get_close_matches` does not accept n=0.
    candidates = difflib.get_close_matches(str(name), names, n=max(len(names), 1), cutoff=_MIN_SIMILARITY)
    if not candidates:
        return None

    def sort_key(candidate: str) -> tuple[float, int]:
        # Candidates may be equally similar, such as z850 and z500 to z501. Then choose the longest common prefix.
        likeness = difflib.SequenceMatcher(None, candidate, str(name)).ratio()
        common_beginning = os.path.commonprefix([candidate, str(name)])
        return likeness, len(common_beginning)

    return max(candidates, key=sort_key)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return the end of an error message about a wrong name: a text that suggests valid names.

    Args:
        name: the wrong name.
        choices: the allowed names.

    Returns:
        ``'; did you mean "x"?'`` with the nearest choice; ``'; choices are a, b'`` if no choice is similar; the empty
        string if there are no choices.
    """
    names = sorted({str(choice) for choice in choices})
    nearest = find_nearest(name, names)
    if nearest is not None:
        return f'; did you mean "{nearest}"?'
    if names:
        return f"; choices are {', '.join(names)}"
    return ""
