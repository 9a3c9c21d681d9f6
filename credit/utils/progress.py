"""Progress bars, and the one switch that silences them for a whole command (``--quiet``)."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

# Whether the user asked for no progress bars and notices; set by `set_quiet`.
_quiet = False


def set_quiet(quiet: bool) -> None:
    """Hide all progress bars and notices of this process, or show them again."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """Return whether the user asked for no progress bars and notices."""
    return _quiet


class ProgressBar(tqdm):
    """A ``tqdm`` bar that `set_quiet` hides.

    Args:
        *arguments: see ``tqdm``.
        disable: True hides the bar, None hides it where the output is not a terminal.
        **options: see ``tqdm``.
    """

    def __init__(self, *arguments: Any, disable: bool | None = None, **options: Any) -> None:
        super().__init__(*arguments, disable=True if is_quiet() else disable, **options)
