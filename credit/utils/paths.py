"""Paths as users write them, in the config and on the command line."""

from __future__ import annotations

import os


def expand_home(path: str) -> str:
    """Return a path with ``~`` and ``~user`` at its beginning replaced by that home folder.

    Raises:
        ValueError: where there is no such home folder, instead of leaving a folder with this name to be made.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(
            f'"{path}": the home folder of {path.split("/")[0]} is not known here; write the whole path, or ./{path} '
            "for a name that begins with ~"
        )
    return expanded
