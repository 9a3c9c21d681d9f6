"""Swin-V2 transformer with the architecture of FuXi (Chen et al. 2023, arXiv 2306.12873).

`Swin` is imported when it is first used, so that a config can look up the model's section without importing torch.
"""

from __future__ import annotations

from credit.models.lazy_exports import lazy_exports

# exported name -> module that defines it
_EXPORTS = {"Swin": "credit.models.swin.model"}
__all__ = ["Swin"]

__getattr__ = lazy_exports(__name__, _EXPORTS)
