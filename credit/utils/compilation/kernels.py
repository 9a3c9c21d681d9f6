"""Decorator for loops that numba compiles, with the same options for all loops."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from numba import njit

logger = logging.getLogger(__name__)

# The compiler may reorder sums to use vector instructions. Flags that assume finite values are deliberately not set.
OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}


def compiled(function: Callable) -> Callable:
    """Decorator that makes numba compile a kernel at its first call.

    The compiled code is cached on disk for later processes if the cache folder can be written.

    Args:
        function: loop over cells that numba can compile and that returns None.
    """
    try:
        kernel = njit(cache=True, **OPTIONS)(function)
    except RuntimeError:
        # Neither the folder of the package nor the home folder is writable, so there is no cache.
        kernel = njit(**OPTIONS)(function)

    @functools.wraps(function)
    def call_kernel(*arguments: object) -> None:
        try:
            kernel(*arguments)
        except OSError as error:
            # The compiled code cannot be saved, because the disk is full, but it is available in memory.
            logger.debug("%s: compiled for this process only (%s)", function.__name__, error)
            kernel(*arguments)

    return call_kernel
