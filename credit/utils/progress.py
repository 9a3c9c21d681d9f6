"""Progress bars, and settings that show or hide all progress bars of a command or of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

# True if progress bars and notices are hidden; set by `set_quiet`.
_quiet = False
# True or False inside `show_progress`: show or hide the progress bars that otherwise depend on the terminal.
_shown: ContextVar[bool | None] = ContextVar("shown", default=None)


def set_quiet(quiet: bool) -> None:
    """Hide all progress bars and notices of this process (True), or show them again (False)."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """Return True if progress bars and notices are hidden (``--quiet``)."""
    return _quiet


@contextmanager
def show_progress(shown: bool) -> Iterator[None]:
    """Context in which progress bars are shown (True) or hidden (False), also if the output is not a terminal.

    Bars that are always hidden, for example those of other ranks, stay hidden.
    """
    token = _shown.set(shown)
    try:
        yield
    finally:
        _shown.reset(token)


class ProgressBar(tqdm):
    """Progress bar of ``tqdm`` that `set_quiet` can hide.

    Args:
        *arguments: positional arguments of ``tqdm``.
        disable: True hides the bar, False shows it. With None, `show_progress` decides; outside of its context, the bar
            is hidden if the output is not a terminal.
        **options: keyword arguments of ``tqdm``.
    """

    def __init__(self, *arguments: Any, disable: bool | None = None, **options: Any) -> None:
        shown = _shown.get()
        if disable is None and shown is not None:
            disable = not shown
        if is_quiet():
            disable = True
        super().__init__(*arguments, disable=disable, **options)
