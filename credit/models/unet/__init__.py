"""U-Net: a convolutional network with skip connections and attention at its coarsest levels.

`UNet` is imported when it is first used, so that a config can look up the model's section without importing torch.
"""

from __future__ import annotations

import importlib
from typing import Any

# exported name -> module that defines it
_EXPORTS = {"UNet": "credit.models.unet.model"}
__all__ = ["UNet"]


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used.

    Raises:
        AttributeError: for any other name.
    """
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
