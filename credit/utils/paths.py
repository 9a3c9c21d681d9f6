"""Conversion of paths from the config and from the command line."""

from __future__ import annotations

import os


def expand_home(path: str) -> str:
    """Return a path in which ``~`` or ``~user`` at the beginning is replaced with the home folder.

    Raises:
        ValueError: if the home folder is unknown. Without this error, a folder named ``~user`` would be created.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(
            f'"{path}": the home folder of {path.split("/")[0]} is not known on this host; write the full path, or '
            f"./{path} for a name that begins with ~"
        )
    return expanded
