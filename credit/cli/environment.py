"""What the libraries behind the commands read from the environment when they are loaded."""

from __future__ import annotations

import os


def set_environment() -> None:
    """Set what suits the commands, unless the environment has it; before numpy is imported and torch makes a tensor.

    - Large pages for tensors of 2 MB and more. A kernel that gives them on request alone (``madvise``, many a
      distribution's setting) clears and looks up 512 times as many small ones else: some per cent of a step or a
      forecast on a CPU (benchmarks/lab_notes.md).
    - One thread for numpy's products of matrices, which are small. Its other threads would wait for more of them, busy,
      on the cores that torch computes on: 8 % of a scored forecast's processor time on two cores.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
