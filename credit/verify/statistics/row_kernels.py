"""The loops over cells in which scores spend their time: sums over stretches of cells, compiled by numba.

A stretch is a run of cells, one after the other in memory, from the number in `firsts` to before that in `lasts`.
Fields are one channel's, (P,) of native float32 or float64; differences, squares and sums are float64. Each function
writes what it finds into the rows of `out`, (K, S) for S stretches; what is not finite makes its sums so.

The functions do not hold the interpreter's lock, so that threads can share the channels. The order in which a stretch
is added up depends on the processor alone. So a compiled function calls no other that adds up, unless that is inlined:
code from the cache would add up in another order than the process that has compiled it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import numpy as np
from numba import njit

logger = logging.getLogger(__name__)


# sums may be taken apart for the processor's vectors; what is not finite stays so
OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}


def compiled(function: Callable) -> Callable:
    """Return `function` compiled at its first call, for later processes, too, where a folder can be written."""
    try:
        called = njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # neither the package's folder nor a home can be written
        called = njit(**OPTIONS)(function)

    @functools.wraps(function)
    def call(*arguments: object) -> None:
        try:
            called(*arguments)
        except OSError as error:  # a full disk; what was compiled is there all the same
            logger.debug("%s: compiled for this process alone (%s)", function.__name__, error)
            called(*arguments)

    return call


@compiled
def weigh(sums: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """Write the sums over all stretches, (K, S), each times its weight in each region, (S, R), in their order.

    A stretch that is outside of a region does not count there, whatever it holds. No library's product of matrices, as
    its last digits depend on K and on threads.
    """
    for k in range(len(sums)):
        row = out[k]
        row[:] = 0.0
        for s in range(len(weights)):
            value, own = sums[k, s], weights[s]
            for r in range(len(own)):
                row[r] += value * own[r] if own[r] != 0.0 else 0.0


@compiled
def plain_sums(values: np.ndarray, firsts: np.ndarray, lasts: np.ndarray, out: np.ndarray) -> None:
    """Write the sums of `values`, which may be bool."""
    for s in range(len(firsts)):
        x = values[firsts[s] : lasts[s]]
        total = 0.0
        for i in range(len(x)):
            total += np.float64(x[i])
        out[0, s] = total


@compiled
def product_sums(x: np.ndarray, y: np.ndarray, firsts: np.ndarray, lasts: np.ndarray, out: np.ndarray) -> None:
    """Write the sums of the products of two fields."""
    for s in range(len(firsts)):
        one, other = x[firsts[s] : lasts[s]], y[firsts[s] : lasts[s]]
        total = 0.0
        for i in range(len(one)):
            total += np.float64(one[i]) * np.float64(other[i])
        out[0, s] = total


@compiled
def anomaly_sums(field: np.ndarray, normal: np.ndarray, firsts: np.ndarray, lasts: np.ndarray, out: np.ndarray) -> None:
    """Write the sums of the anomaly of `field` to the climatology `normal` and of its square."""
    for s in range(len(firsts)):
        x, n = field[firsts[s] : lasts[s]], normal[firsts[s] : lasts[s]]
        total = square = 0.0
        for i in range(len(x)):
            anomaly = np.float64(x[i]) - np.float64(n[i])
            total += anomaly
            square += anomaly * anomaly
        out[0, s], out[1, s] = total, square
