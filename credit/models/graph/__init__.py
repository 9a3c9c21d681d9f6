"""Graph network on a refined icosahedral mesh (GraphCast, GenCast).

`GraphNetwork` is imported when it is first used, so that a config can look up the model's section without importing
torch.
"""

from __future__ import annotations

from credit.models.lazy_exports import lazy_exports

# exported name -> module that defines it
_EXPORTS = {"GraphNetwork": "credit.models.graph.model"}
__all__ = ["GraphNetwork"]

__getattr__ = lazy_exports(__name__, _EXPORTS)
