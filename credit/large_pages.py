"""Large pages of memory for tensors on Linux. Imports nothing, as it has to come before torch's first tensor."""

from __future__ import annotations

import os


def use_large_pages() -> None:
    """Let torch ask the kernel for large pages for tensors of 2 MB and more, unless the environment says otherwise.

    A kernel that gives large pages on request alone (``madvise``, many a distribution's setting) clears and looks up
    512 times as many small ones else: 3 to 8 % of a step's or a forecast's time on a CPU (docs/lab_notes.md). torch reads
    the variable when it makes its first tensor.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
