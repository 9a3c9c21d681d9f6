"""Large pages of memory for tensors on Linux; to be asked for before torch makes its first tensor."""

from __future__ import annotations

import os


def use_large_pages() -> None:
    """Let torch ask the kernel for large pages for tensors of 2 MB and more, unless the environment says otherwise.

    A kernel that gives large pages on request alone (``madvise``, many a distribution's setting) clears and looks up
    512 times as many small ones else: 3 to 8 % of the time of a step or a forecast on a CPU (docs/lab_notes.md). torch
    reads the variable when it makes its first tensor.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
