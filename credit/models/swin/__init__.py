"""Swin-V2 transformer in the form of FuXi (arXiv 2306.12873).

`Swin` is imported when it is first used, so that a config can look up the model's section without importing torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Swin"]


def __getattr__(name: str) -> Any:
    """Import `Swin` when it is first used.

    Raises:
        AttributeError: for any other name.
    """
    if name == "Swin":
        return importlib.import_module("credit.models.swin.model").Swin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
