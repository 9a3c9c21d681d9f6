"""Continuous ranked probability score, variance and the truth's rank of an ensemble, summed over stretches of cells.

With the members x_i, i = 1 .. M, and the truth y, the kernel form (Gneiting and Raftery 2007,
doi:10.1198/016214506000001437) is::

    CRPS = mean |x_i - y| - D / M^2,          D = sum over pairs i < j of |x_i - x_j|

This is the score of the ensemble's own empirical distribution. Its expectation depends on M: an ensemble drawn from
the distribution F scores worse than F by 1 / (2 M) of the mean distance of two draws. The fair score (Ferro 2014,
doi:10.1002/qj.2270) takes D / (M (M - 1)) instead, whose expectation is that of F for every M.

Of sorted values, D = sum over k = 1 .. M of (2 k - M - 1) x_(k), so that no pair is ever formed.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from credit.verify.statistics.row_kernels import OPTIONS, compiled

OF_MEMBERS = 3  # sums before those of the ranks
_CELLS = 64  # that are sorted side by side; of 50 members they are 26 kB


@compiled
def member_sums(
    members: np.ndarray, channel: int, truth: np.ndarray, valid: np.ndarray, firsts: np.ndarray, lasts: np.ndarray,
    out: np.ndarray,
) -> None:  # fmt: skip
    """Write what is needed of the members of one channel, in time O(M log^2 M).

    See `credit.verify.statistics.row_kernels` for the arguments.

    A truth that equals t members has t + 1 possible ranks, each of which gets 1 / (t + 1).

    Args:
        members: (M, C, P), in the order of memory.
        channel: which of C.
        truth: (P,) of that channel.
        valid: (P,) bool; other cells count nothing, whatever their values.
        firsts, lasts: the stretches.
        out: (4 + M, S): sums over the members' distance to the truth, D, the unbiased variance over members, and the
            frequency of each of the truth's ranks 0 to M.
    """
    count = members.shape[0]
    room, mean = np.empty((count, _CELLS)), np.empty(_CELLS)
    below, equal = np.empty(_CELLS), np.empty(_CELLS)
    for s in range(len(firsts)):
        out[:, s] = 0.0
        for first in range(firsts[s], lasts[s], _CELLS):
            cells = min(_CELLS, lasts[s] - first)
            y, there = truth[first : first + cells], valid[first : first + cells]
            below[:], equal[:], mean[:] = 0.0, 0.0, 0.0
            error = square = distances = 0.0
            for m in range(count):
                x, row = members[m, channel, first : first + cells], room[m]
                for i in range(cells):
                    apart = np.float64(x[i]) - np.float64(y[i]) if there[i] else 0.0
                    row[i] = apart
                    error += abs(apart)
                    mean[i] += apart / count
                    below[i] += 1.0 if apart < 0.0 else 0.0
                    equal[i] += 1.0 if apart == 0.0 else 0.0
            _sort_columns(room, cells)
            for m in range(count):
                row, factor = room[m], 2.0 * m + 1.0 - count
                for i in range(cells):
                    distances += factor * row[i]
                    square += (row[i] - mean[i]) ** 2
            out[0, s] += error
            out[1, s] += distances
            out[2, s] += square / (count - 1)
            for i in range(cells):
                if there[i]:
                    rank, ties = int(below[i]), int(equal[i])
                    for k in range(rank, rank + ties + 1):
                        out[3 + k, s] += 1.0 / (ties + 1)


# Inlining makes it slower. It moves values and adds up nothing, so its result cannot depend on how it is compiled
# (see `credit.verify.statistics.error_kernel`).
@njit(**OPTIONS)
def _sort_columns(values: np.ndarray, cells: int) -> None:
    """Sort the first columns of `values` (M, N), by Batcher's merge exchange (Knuth, vol. 3, 5.2.2, algorithm M).

    Which rows it compares does not depend on the values, so that the columns go through the processor's vectors.
    """
    count = len(values)
    top = 1
    while 2 * top < count:
        top *= 2
    width = top if count > 1 else 0
    while width > 0:
        reach, offset, apart = top, 0, width
        while True:
            for m in range(count - apart):
                if m & width == offset:
                    low, high = values[m], values[m + apart]
                    for i in range(cells):
                        one, other = low[i], high[i]
                        low[i] = other if one > other else one
                        high[i] = one if one > other else other
            if reach == width:
                break
            apart, reach, offset = reach - width, reach // 2, width
        width //= 2


def crps_of(sums: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard and the fair CRPS, or of vectors the energy scores, of the first two sums or their means.

    Args:
        sums: (2 or more, ...).
        count: M; of one member the fair score is NaN.
    """
    error, distances = sums[0] / count, sums[1]
    fair = error - distances / (count * (count - 1)) if count > 1 else np.full_like(error, np.nan)
    return error - distances / count**2, fair
