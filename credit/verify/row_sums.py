"""The loops over cells in which scores spend their time: sums over stretches of cells, compiled by numba.

A stretch is a run of cells, one after the other in memory, from the number in `firsts` to before that in `lasts`.
Fields are one channel's, (P,) of native float32 or float64; differences, squares and sums are float64, but for lengths
of vectors. Each function writes what it finds into the rows of `out`, (K, S) for S stretches; what is not finite makes
its sums so.

The functions do not hold the interpreter's lock, so that threads can share the channels. The order in which a stretch
is added up depends on the processor alone.
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
    """Write the sums of the anomaly of `field` to the climatology `normal`, of its square and of its size."""
    for s in range(len(firsts)):
        x, n = field[firsts[s] : lasts[s]], normal[firsts[s] : lasts[s]]
        total = square = size = 0.0
        for i in range(len(x)):
            anomaly = np.float64(x[i]) - np.float64(n[i])
            total += anomaly
            square += anomaly * anomaly
            size += abs(anomaly)
        out[0, s], out[1, s], out[2, s] = total, square, size


@compiled
def error_sums(
    field: np.ndarray, truth: np.ndarray, normal: np.ndarray, firsts: np.ndarray, lasts: np.ndarray, out: np.ndarray
) -> None:
    """Write the sums of the error of `field`, of its square, its product with the truth's anomaly and its size."""
    for s in range(len(firsts)):
        x, o, n = field[firsts[s] : lasts[s]], truth[firsts[s] : lasts[s]], normal[firsts[s] : lasts[s]]
        total = square = product = size = 0.0
        for i in range(len(x)):
            true = np.float64(o[i])
            error = np.float64(x[i]) - true
            total += error
            square += error * error
            product += error * (true - np.float64(n[i]))
            size += abs(error)
        out[0, s], out[1, s], out[2, s], out[3, s] = total, square, product, size


@compiled
def damped_sums(
    first: np.ndarray, r: float, truth: np.ndarray, normal: np.ndarray, firsts: np.ndarray, lasts: np.ndarray,
    out: np.ndarray,
) -> None:  # fmt: skip
    """Write the sums of the product of the anomaly `first` with the truth's, and, of the error of the forecast whose
    anomaly is r times `first`, of the square and the size.
    """
    for s in range(len(firsts)):
        x, o, n = first[firsts[s] : lasts[s]], truth[firsts[s] : lasts[s]], normal[firsts[s] : lasts[s]]
        product = square = size = 0.0
        for i in range(len(x)):
            own, true = np.float64(x[i]), np.float64(o[i]) - np.float64(n[i])
            error = r * own - true
            product += own * true
            square += error * error
            size += abs(error)
        out[0, s], out[1, s], out[2, s] = product, square, size


@compiled
def length_sums(
    u: np.ndarray, v: np.ndarray, true_u: np.ndarray, true_v: np.ndarray, scale: np.float32,
    firsts: np.ndarray, lasts: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Write the sums of a wind's length less the true wind's, and of the length of the vector between them.

    Lengths have the digits of the fields, as roots of float64 take most of the time; `scale`, a power of two, brings
    winds to where float32 holds their squares. What it does not hold makes the sums infinite.
    """
    for s in range(len(firsts)):
        x, y = u[firsts[s] : lasts[s]], v[firsts[s] : lasts[s]]
        a, b = true_u[firsts[s] : lasts[s]], true_v[firsts[s] : lasts[s]]
        longer = apart = 0.0
        for i in range(len(x)):
            east, north, true_east, true_north = scale * x[i], scale * y[i], scale * a[i], scale * b[i]
            own, true = np.sqrt(east * east + north * north), np.sqrt(true_east * true_east + true_north * true_north)
            longer += np.float64(own) - np.float64(true)
            east, north = east - true_east, north - true_north
            apart += np.float64(np.sqrt(east * east + north * north))
        out[0, s], out[1, s] = longer / scale, apart / scale
