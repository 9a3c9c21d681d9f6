"""Graph network on a refined icosahedral mesh (GraphCast, GenCast).

`GraphNetwork` is imported when it is first used, so that a config can look up the model's section without importing
torch.
"""

from __future__ import annotations

import importlib
from typing import Any

# exported name -> module that defines it
_EXPORTS = {"GraphNetwork": "credit.models.graph.model"}
__all__ = ["GraphNetwork"]


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used.

    Raises:
        AttributeError: for any other name.
    """
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
