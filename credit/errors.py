"""Errors that a user can act on, and the nearest-name helper that their messages use.

A message names the key or file, the value, the rule and a way out. Anything else that is raised is a defect of ours.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

# Twice the letters in common over all letters. One wrong letter of three gives 0.67; at 0.6 and below, names that mean
# something else are alike by chance ("mode" and "folder").
_LEAST_LIKENESS = 0.65


class CreditError(Exception):
    """Base of every error that is addressed to the user; the commands print it without a traceback."""

    exit_code = 1


class ConfigError(CreditError):
    """A wrong key, type, range or combination in a config; exit code 2."""

    exit_code = 2


class DataError(CreditError):
    """Input data that is missing, unreadable or not what the config says; exit code 2."""

    exit_code = 2


class CheckpointError(CreditError):
    """A checkpoint that is missing, damaged or of another model."""


def find_nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice nearest to `name`, None where none is near."""
    names = sorted({str(choice) for choice in choices})
    candidates = difflib.get_close_matches(str(name), names, n=max(len(names), 1), cutoff=_LEAST_LIKENESS)
    if not candidates:
        return None
    # Of candidates with equally many letters in common, such as z850 and z500 for z501, take the one whose beginning
    # agrees for longest.
    likeness = {candidate: difflib.SequenceMatcher(None, candidate, str(name)).ratio() for candidate in candidates}
    return max(
        candidates,
        key=lambda candidate: (likeness[candidate], len(os.path.commonprefix([candidate, str(name)]))),
    )


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ``'; did you mean "x"?'`` for the choice nearest to `name`, or the list of choices where none is near."""
    names = sorted({str(choice) for choice in choices})
    nearest = find_nearest(name, names)
    if nearest is not None:
        return f'; did you mean "{nearest}"?'
    return f"; choices are {', '.join(names)}" if names else ""
