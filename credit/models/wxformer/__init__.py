"""WXFormer, and the conversion of its published weights.

`WXFormer` and `from_published` are imported when they are first used, so that a config can look up the model's section
without importing torch.
"""

from __future__ import annotations

import importlib
from typing import Any

# exported name -> module that defines it
_EXPORTS = {
    "WXFormer": "credit.models.wxformer.model",
    "from_published": "credit.models.wxformer.convert_published",
}
__all__ = ["WXFormer", "from_published"]


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used.

    Raises:
        AttributeError: for any other name.
    """
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
