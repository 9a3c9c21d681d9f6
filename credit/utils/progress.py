"""Progress bars, and a setting that hides all progress bars of a command (``--quiet``)."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

# True if progress bars and notices are hidden; set by `set_quiet`.
_quiet = False


def set_quiet(quiet: bool) -> None:
    """Hide all progress bars and notices of this process (True), or show them again (False)."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """Return True if progress bars and notices are hidden (``--quiet``)."""
    return _quiet


class ProgressBar(tqdm):
    """Progress bar of ``tqdm`` that `set_quiet` can hide.

    Args:
        *arguments: positional arguments of ``tqdm``.
        disable: True hides the bar, False shows it, None hides it if the output is not a terminal.
        **options: keyword arguments of ``tqdm``.
    """

    def __init__(self, *arguments: Any, disable: bool | None = None, **options: Any) -> None:
        if is_quiet():
            disable = True
        super().__init__(*arguments, disable=disable, **options)
