"""Paths as users write them, in the config and on the command line."""

from __future__ import annotations

import os


def expand_home(path: str) -> str:
    """Return a path with ``~`` or ``~user`` at its beginning replaced by that home folder.

    Raises:
        ValueError: if the home folder is not known. Without this error, a folder named ``~user`` would be created.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(
            f'"{path}": the home folder of {path.split("/")[0]} is not known on this host; write the whole path, or '
            f"./{path} for a name that begins with ~"
        )
    return expanded
