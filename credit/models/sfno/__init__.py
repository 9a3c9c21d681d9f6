"""Spherical Fourier neural operator (SFNO).

`SFNO` is imported when it is first used, so that a config can look up the model's section without importing torch.
"""

from __future__ import annotations

from credit.models.lazy_exports import lazy_exports

# exported name -> module that defines it
_EXPORTS = {"SFNO": "credit.models.sfno.model"}
__all__ = ["SFNO"]

__getattr__ = lazy_exports(__name__, _EXPORTS)
