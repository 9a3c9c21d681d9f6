"""Errors that a user can act on, and the nearest-name helper that their messages use.

A message names the key or file, the value, the rule and a remedy. Any other exception is a defect of this package.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

# Similarity of two names by `difflib`: twice the number of common letters, divided by the number of letters of both
# names. One wrong letter of three gives 0.67. At 0.6 and below, unrelated names are similar by chance, as "mode" and
# "folder" are.
_MIN_LIKENESS = 0.65


class CreditError(Exception):
    """Base of every error that is addressed to the user; the commands print it without a traceback.

    Attributes:
        exit_code: exit status of the command that ends with this error.
    """

    exit_code = 1


class ConfigError(CreditError):
    """Error for a wrong key, type, range or combination in a config; exit code 2."""

    exit_code = 2


class DataError(CreditError):
    """Error for input data that are missing, unreadable or not what the config says; exit code 2."""

    exit_code = 2


class UnavailableError(DataError):
    """Error for input data that a server does not deliver at present; it says nothing about the data; exit code 2."""


class CycleError(CreditError):
    """Error for an operational analysis that cannot be used, such as one with a missing record; exit code 3."""

    exit_code = 3


class CheckpointError(CreditError):
    """Error for a checkpoint that is missing, damaged or of another model; exit code 1."""


def find_nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is spelled most like `name`, None if no choice is similar enough (`_MIN_LIKENESS`)."""
    names = sorted({str(choice) for choice in choices})
    # All similar names are candidates; `get_close_matches` refuses n=0.
    candidates = difflib.get_close_matches(str(name), names, n=max(len(names), 1), cutoff=_MIN_LIKENESS)
    if not candidates:
        return None

    def sort_key(candidate: str) -> tuple[float, int]:
        # Some candidates are equally similar, such as z850 and z500 to z501; then the longer common beginning decides.
        likeness = difflib.SequenceMatcher(None, candidate, str(name)).ratio()
        common_beginning = os.path.commonprefix([candidate, str(name)])
        return likeness, len(common_beginning)

    return max(candidates, key=sort_key)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return the end of an error message about a wrong name, which proposes other names.

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
