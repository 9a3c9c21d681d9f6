"""Spherical Fourier neural operator (SFNO).

`SFNO` is imported when it is first used, so that a config can look up the model's section without importing torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SFNO"]


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used.

    Raises:
        AttributeError: for any other name.
    """
    if name == "SFNO":
        from credit.models.sfno.model import SFNO

        return SFNO
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
