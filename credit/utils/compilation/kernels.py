"""Decorator for loops that numba compiles, with the options that all of them share."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from numba import njit

logger = logging.getLogger(__name__)

# Sums may be reordered for the processor's vectors. The flags that assume finite values are left out on purpose.
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
        # Neither the package's folder nor the home folder can be written.
        kernel = njit(**OPTIONS)(function)

    @functools.wraps(function)
    def call_kernel(*arguments: object) -> None:
        try:
            kernel(*arguments)
        except OSError as error:
            # The disk is full, but the code was compiled in memory before it could not be saved.
            logger.debug("%s: compiled for this process only (%s)", function.__name__, error)
            kernel(*arguments)

    return call_kernel
