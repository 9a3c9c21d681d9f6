"""Sums over cells of one channel, or of a wind and its components, of a forecast and baselines together.

What is read of each field is read once: cells go block by block through the processor's cache. The options of the
compiler and the form of stretches and sums are those of `credit.verify.statistics.row_kernels`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from credit.verify.statistics.row_kernels import OPTIONS, compiled

# rows of sums: of the truth, of each forecast, of damped persistence; of each one's lengths
OF_TRUTH, OF_FORECAST, OF_DAMPED, OF_VECTOR = 3, 4, 3, 2
_CELLS = 1024  # of a block
# Helpers become part of `unit_sums`. If one stays a function of its own, the process that compiles it runs another
# version of it than the processes that load the caller from the cache. Their sums then differ in the last digits.
_inner = njit(forceinline=True, **OPTIONS)


@compiled
def unit_sums(
    channels: np.ndarray, truth: np.ndarray, weights: np.ndarray, parts: tuple[np.ndarray, ...],
    forecasts: tuple[np.ndarray, ...], first: np.ndarray, r: np.ndarray, valid: np.ndarray, masked: np.ndarray,
    scale: np.float32, firsts: np.ndarray, lasts: np.ndarray, out: np.ndarray, of_vector: np.ndarray,
) -> None:  # fmt: skip
    """Write the sums of one channel, or of a vector and its two components.

    Fields are (C, P) of one float type, whatever where masked; each tuple has arrays of one type.

    Args:
        channels: (1,) or (2,), their numbers.
        truth: the truth.
        weights: (K,) that the climatology has of `parts`.
        parts: K fields.
        forecasts: F fields, at least one.
        first: anomaly at the initial time, which damped persistence is `r` times; (0, P) where it is not scored.
        r: (C,).
        valid: (C, P) bool; other cells count nothing.
        masked: (C,) bool, whether there are such cells.
        scale: power of two that brings winds to where float32 holds their squares. What it does not hold makes the
            sums of lengths infinite.
        firsts, lasts: (S,) the stretches, see `credit.verify.statistics.row_kernels`.
        out: (channels, K, S), the sums of the truth's anomaly, of its square and its size; of each forecast of its
            error, the square, the product with the truth's anomaly and the size; of damped persistence of the product
            of `first` with the truth's anomaly, of the square of the error and its size.
        of_vector: (L, S), of each forecast, then of damped persistence and of the climatology where `first` is given,
            of its length less the truth's, and of the length of the vector between them; (0, S) for one channel.
    """
    count, damped = len(forecasts), len(first) > 0
    rows = count + 2 if damped else count
    true, normal = np.empty((2, _CELLS), truth.dtype), np.empty((2, _CELLS), truth.dtype)
    values = np.empty((rows, 2, _CELLS), forecasts[0].dtype)
    length = np.empty(_CELLS, truth.dtype)
    out[:], of_vector[:] = 0.0, 0.0
    for s in range(len(firsts)):
        for begin in range(firsts[s], lasts[s], _CELLS):
            cells = min(_CELLS, lasts[s] - begin)
            for k, c in enumerate(channels):
                t, n, there = true[k, :cells], normal[k, :cells], valid[c, begin : begin + cells]
                _load(truth[c, begin : begin + cells], there, masked[c], t)
                _weigh_parts(weights, parts, c, begin, there, masked[c], n)
                _add_anomaly(t, n, out[k, :, s])
                for f in range(count):
                    x = values[f, k, :cells]
                    _load(forecasts[f][c, begin : begin + cells], there, masked[c], x)
                    _add_error(x, t, n, out[k, OF_TRUTH + OF_FORECAST * f :, s])
                if damped:
                    own = first[c, begin : begin + cells]
                    _add_damped(own, r[c], t, n, values[count, k, :cells], out[k, OF_TRUTH + OF_FORECAST * count :, s])
                    _load(n, there, False, values[count + 1, k, :cells])
            if len(of_vector) > 0:
                u, v = true[0, :cells], true[1, :cells]
                _set_length(u, v, scale, length[:cells])
                for f in range(rows):
                    x, y = values[f, 0, :cells], values[f, 1, :cells]
                    _add_lengths(x, y, u, v, length[:cells], scale, of_vector[2 * f :, s])
    of_vector /= scale


@_inner
def _load(field: np.ndarray, there: np.ndarray, masked: bool, to: np.ndarray) -> None:
    for i in range(len(to)):
        to[i] = field[i]
    if masked:
        _hide(there, to)


@_inner
def _weigh_parts(
    weights: np.ndarray, parts: tuple[np.ndarray, ...], c: int, begin: int, there: np.ndarray, masked: bool,
    to: np.ndarray,
) -> None:  # fmt: skip
    weight, part = weights[0], parts[0][c, begin : begin + len(to)]
    for i in range(len(to)):
        to[i] = weight * part[i]
    for k in range(1, len(parts)):
        weight, part = weights[k], parts[k][c, begin : begin + len(to)]
        for i in range(len(to)):
            to[i] += weight * part[i]
    if masked:
        _hide(there, to)


@_inner
def _hide(there: np.ndarray, field: np.ndarray) -> None:
    for i in range(len(field)):
        if not there[i]:
            field[i] = 0.0


@_inner
def _add_anomaly(true: np.ndarray, normal: np.ndarray, out: np.ndarray) -> None:
    total = square = size = 0.0
    for i in range(len(true)):
        anomaly = np.float64(true[i]) - np.float64(normal[i])
        total += anomaly
        square += anomaly * anomaly
        size += abs(anomaly)
    out[0] += total
    out[1] += square
    out[2] += size


@_inner
def _add_error(x: np.ndarray, true: np.ndarray, normal: np.ndarray, out: np.ndarray) -> None:
    total = square = product = size = 0.0
    for i in range(len(x)):
        here = np.float64(true[i])
        error = np.float64(x[i]) - here
        total += error
        square += error * error
        product += error * (here - np.float64(normal[i]))
        size += abs(error)
    out[0] += total
    out[1] += square
    out[2] += product
    out[3] += size


@_inner
def _add_damped(
    first: np.ndarray, r: float, true: np.ndarray, normal: np.ndarray, values: np.ndarray, out: np.ndarray
) -> None:
    """Add up the errors of the forecast whose anomaly is r times `first`, and write its values."""
    product = square = size = 0.0
    for i in range(len(first)):
        own, here = np.float64(first[i]), np.float64(true[i]) - np.float64(normal[i])
        error = r * own - here
        product += own * here
        square += error * error
        size += abs(error)
    for i in range(len(first)):
        values[i] = r * first[i] + normal[i]
    out[0] += product
    out[1] += square
    out[2] += size


@_inner
def _set_length(u: np.ndarray, v: np.ndarray, scale: np.float32, length: np.ndarray) -> None:
    for i in range(len(length)):
        east, north = scale * u[i], scale * v[i]
        length[i] = np.sqrt(east * east + north * north)


@_inner
def _add_lengths(
    x: np.ndarray, y: np.ndarray, u: np.ndarray, v: np.ndarray, length: np.ndarray, scale: np.float32, out: np.ndarray
) -> None:
    """Add up lengths that have the digits of the fields, as roots of float64 take most of the time."""
    longer = apart = 0.0
    for i in range(len(length)):
        east, north = scale * x[i], scale * y[i]
        longer += np.float64(np.sqrt(east * east + north * north)) - np.float64(length[i])
        east, north = east - scale * u[i], north - scale * v[i]
        apart += np.float64(np.sqrt(east * east + north * north))
    out[0] += longer
    out[1] += apart
