"""U-Net: a convolutional network with skip connections and attention at its coarsest levels.

`UNet` is imported when it is first used, so that a config can look up the model's section without importing torch.
"""

from __future__ import annotations

from credit.models.lazy_exports import lazy_exports

# exported name -> module that defines it
_EXPORTS = {"UNet": "credit.models.unet.model"}
__all__ = ["UNet"]

__getattr__ = lazy_exports(__name__, _EXPORTS)
