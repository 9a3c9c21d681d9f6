"""WXFormer (Schreck et al. 2025), and the conversion of its published weights.

`WXFormer` and `from_published` are imported when they are first used, so that a config can look up the model's section
without importing torch.
"""

from __future__ import annotations

from credit.models.lazy_exports import lazy_exports

# exported name -> module that defines it
_EXPORTS = {
    "WXFormer": "credit.models.wxformer.model",
    "from_published": "credit.models.wxformer.convert_published",
}
__all__ = ["WXFormer", "from_published"]

__getattr__ = lazy_exports(__name__, _EXPORTS)
