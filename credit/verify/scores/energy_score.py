"""Energy score of an ensemble of wind vectors, summed over stretches of cells: the CRPS of two components at once.

With norms for absolute values it is the CRPS of `credit.verify.scores.crps` (Gneiting and Raftery 2007,
doi:10.1198/016214506000001437)::

    ES = mean ||x_i - y|| - D / M^2,          D = sum over pairs i < j of ||x_i - x_j||

and the fair one has D / (M (M - 1)). Vectors have no order to sort by, so the time is O(M^2).
"""

from __future__ import annotations

import numpy as np

from credit.verify.statistics.row_kernels import compiled

_CELLS = 64


@compiled
def vector_member_sums(
    members: np.ndarray, pair: tuple[int, int], true_u: np.ndarray, true_v: np.ndarray, valid: np.ndarray,
    scale: np.float32, firsts: np.ndarray, lasts: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Write the sums over the members' distances to the true vector, and D; see `credit.verify.statistics.row_kernels`.

    Args:
        members: (M, C, P), in the order of memory; lengths have its digits.
        pair: the channels of the components.
        true_u, true_v: (P,) of these.
        valid: (P,) bool; other cells count nothing, whatever their values.
        scale: see `credit.verify.statistics.error_kernel.unit_sums`.
        firsts, lasts: the stretches.
        out: (2, S).
    """
    count, nothing = members.shape[0], np.float32(0.0)
    # values themselves, not their errors: a small difference of two is exact
    east, north = np.zeros((count, _CELLS), members.dtype), np.zeros((count, _CELLS), members.dtype)
    for s in range(len(firsts)):
        error = distances = 0.0
        for first in range(firsts[s], lasts[s], _CELLS):
            cells = min(_CELLS, lasts[s] - first)
            a, b = true_u[first : first + cells], true_v[first : first + cells]
            there = valid[first : first + cells]
            for m in range(count):
                u, v = members[m, pair[0], first : first + cells], members[m, pair[1], first : first + cells]
                x, y = east[m], north[m]
                for i in range(cells):
                    x[i], y[i] = scale * u[i] if there[i] else nothing, scale * v[i] if there[i] else nothing
                    p = x[i] - (scale * a[i] if there[i] else nothing)
                    q = y[i] - (scale * b[i] if there[i] else nothing)
                    error += np.float64(np.sqrt(p * p + q * q))
            for m in range(1, count):
                for k in range(m):
                    x, y, z, w = east[m], north[m], east[k], north[k]
                    for i in range(cells):
                        p, q = x[i] - z[i], y[i] - w[i]
                        distances += np.float64(np.sqrt(p * p + q * q))
        out[0, s], out[1, s] = error / scale, distances / scale
