"""Compiled sums of the CRPS and the energy score of an ensemble over segments of cells.

With the members x_i, i = 1 .. M, and the truth y, the kernel form (Gneiting and Raftery 2007,
doi:10.1198/016214506000001437) is::

    CRPS = mean |x_i - y| - D / M^2,          D = sum over pairs i < j of |x_i - x_j|

This is the score of the empirical distribution of the ensemble. Its expectation depends on M. If the members are
sampled from a distribution F, the expectation exceeds the CRPS of F by the mean distance of two samples divided by 2 M.
The fair score (Ferro 2014, doi:10.1002/qj.2270) subtracts D / (M (M - 1)) instead, so its expectation is the CRPS of F
for every M.

For sorted members x_(1) <= ... <= x_(M), D = sum over k = 1 .. M of (2 k - M - 1) x_(k), so the pairs need not be
computed. The energy score of wind vectors has the same formula with lengths of vectors instead of absolute values.
Vectors cannot be sorted, so the computation of the energy score takes O(M^2) time.

`credit.verify.statistics.kernels` explains segments, the compilation of kernels, and their output arrays.

Shapes: M members, C channels, P cells, S segments.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from credit.utils.compilation.kernels import OPTIONS, compiled
from credit.verify.statistics.kernels import Segments

# Number of sums of `member_sums` before the sums of the ranks.
NUM_MEMBER_SUMS = 3
# Number of cells that are sorted together. For 50 members, the block is 26 kB and fits in the first-level CPU cache.
_BLOCK_CELLS = 64


@compiled
def member_sums(
    members_MCP: np.ndarray, channel: int, truth_P: np.ndarray, valid_P: np.ndarray, segments: Segments, out: np.ndarray
) -> None:  # fmt: skip
    """Write the sums over each segment that CRPS, spread and rank histogram of one channel need.

    Args:
        members_MCP: fields of the members, contiguous in memory.
        channel: index of the channel in `members_MCP`.
        truth_P: truth of the channel.
        valid_P: bool, False in cells that are left out; such cells may contain any value.
        segments: the S segments.
        out: (4 + M, S) output. Rows 0 to 2 are sums over cells: absolute errors of all members, D (see the module
            docstring), unbiased variance over members. The other M + 1 rows count the cells by rank of the truth, 0 to
            M. If t members equal the truth, the cell adds 1 / (t + 1) to each of the t + 1 possible ranks.
    """
    segment_starts, segment_stops = segments
    num_members = members_MCP.shape[0]
    errors = np.empty((num_members, _BLOCK_CELLS))
    mean_error = np.empty(_BLOCK_CELLS)
    members_below = np.empty(_BLOCK_CELLS)
    members_equal = np.empty(_BLOCK_CELLS)
    for s in range(len(segment_starts)):
        out[:, s] = 0.0
        for start in range(segment_starts[s], segment_stops[s], _BLOCK_CELLS):
            cells = min(_BLOCK_CELLS, segment_stops[s] - start)
            y = truth_P[start : start + cells]
            is_valid = valid_P[start : start + cells]
            members_below[:] = 0.0
            members_equal[:] = 0.0
            mean_error[:] = 0.0
            absolute = square = distances = 0.0
            for m in range(num_members):
                x = members_MCP[m, channel, start : start + cells]
                row = errors[m]
                for i in range(cells):
                    error = np.float64(x[i]) - np.float64(y[i]) if is_valid[i] else 0.0
                    row[i] = error
                    absolute += abs(error)
                    mean_error[i] += error / num_members
                    members_below[i] += 1.0 if error < 0.0 else 0.0
                    members_equal[i] += 1.0 if error == 0.0 else 0.0
            # Errors are sorted instead of members, because in each cell the errors have the same order and the same
            # distances as the members. Errors of masked cells are 0, so they do not change the sums.
            _sort_columns(errors, cells)
            for m in range(num_members):
                row = errors[m]
                factor = 2.0 * m + 1.0 - num_members
                for i in range(cells):
                    distances += factor * row[i]
                    square += (row[i] - mean_error[i]) ** 2
            out[0, s] += absolute
            out[1, s] += distances
            out[2, s] += square / (num_members - 1)
            for i in range(cells):
                if is_valid[i]:
                    rank = int(members_below[i])
                    ties = int(members_equal[i])
                    for k in range(rank, rank + ties + 1):
                        out[NUM_MEMBER_SUMS + k, s] += 1.0 / (ties + 1)


# This function is not inlined, because inlining makes it slower. It does not add numbers, so its result does not depend
# on the compilation.
@njit(**OPTIONS)
def _sort_columns(values: np.ndarray, cells: int) -> None:
    """Sort each of the first `cells` columns of `values` in place with Batcher's merge exchange.

    Source: Knuth, The Art of Computer Programming, vol. 3, section 5.2.2, algorithm M. The algorithm compares the same
    pairs of rows for all values, so vector instructions sort all columns at once.

    Args:
        values: (M, N) values of M members in N cells.
        cells: number of columns to sort; later columns are not changed.
    """
    # Knuth uses the names t = top, p = width, q = reach, r = offset, d = distance. `top` is the largest power of two
    # below the number of rows.
    num_rows = len(values)
    top = 1
    while 2 * top < num_rows:
        top *= 2
    width = top if num_rows > 1 else 0
    while width > 0:
        reach = top
        offset = 0
        distance = width
        while True:
            for m in range(num_rows - distance):
                if m & width == offset:
                    low = values[m]
                    high = values[m + distance]
                    for i in range(cells):
                        a = low[i]
                        b = high[i]
                        low[i] = b if a > b else a
                        high[i] = a if a > b else b
            if reach == width:
                break
            distance = reach - width
            reach = reach // 2
            offset = width
        width //= 2


@compiled
def vector_member_sums(
    members_MCP: np.ndarray, pair: tuple[int, int], truth_u: np.ndarray, truth_v: np.ndarray, valid_P: np.ndarray,
    scale: np.float32, segments: Segments, out: np.ndarray,
) -> None:  # fmt: skip
    """Write the sums over each segment that the energy score of one wind vector needs.

    Args:
        members_MCP: fields of the members, contiguous in memory; lengths of vectors are computed in their precision.
        pair: channel indices of the two components.
        truth_u: (P,) eastward component of the truth.
        truth_v: (P,) northward component of the truth.
        valid_P: bool, False in cells that are left out; such cells may contain any value.
        scale: power of two by which winds are multiplied so that float32 can represent their squares.
        segments: the S segments.
        out: (2, S) output: the sums over cells of the lengths of the error vectors of all members, and of D (see the
            module docstring). Both sums are divided by `scale`, so they are in the units of the winds.
    """
    segment_starts, segment_stops = segments
    num_members = members_MCP.shape[0]
    zero = np.float32(0.0)
    # Winds are stored instead of their errors, because the difference of two similar winds is exact.
    scaled_u = np.zeros((num_members, _BLOCK_CELLS), members_MCP.dtype)
    scaled_v = np.zeros((num_members, _BLOCK_CELLS), members_MCP.dtype)
    for s in range(len(segment_starts)):
        error = distances = 0.0
        for start in range(segment_starts[s], segment_stops[s], _BLOCK_CELLS):
            cells = min(_BLOCK_CELLS, segment_stops[s] - start)
            true_u = truth_u[start : start + cells]
            true_v = truth_v[start : start + cells]
            is_valid = valid_P[start : start + cells]
            for m in range(num_members):
                u = members_MCP[m, pair[0], start : start + cells]
                v = members_MCP[m, pair[1], start : start + cells]
                # The loop fills these views of the scaled components of the member.
                x = scaled_u[m]
                y = scaled_v[m]
                for i in range(cells):
                    x[i] = scale * u[i] if is_valid[i] else zero
                    y[i] = scale * v[i] if is_valid[i] else zero
                    error_x = x[i] - (scale * true_u[i] if is_valid[i] else zero)
                    error_y = y[i] - (scale * true_v[i] if is_valid[i] else zero)
                    error += np.float64(np.sqrt(error_x * error_x + error_y * error_y))
            # Vectors cannot be sorted, so the distance of every pair is computed.
            for m in range(1, num_members):
                for k in range(m):
                    x = scaled_u[m]
                    y = scaled_v[m]
                    other_x = scaled_u[k]
                    other_y = scaled_v[k]
                    for i in range(cells):
                        distance_x = x[i] - other_x[i]
                        distance_y = y[i] - other_y[i]
                        distances += np.float64(np.sqrt(distance_x * distance_x + distance_y * distance_y))
        out[0, s] = error / scale
        out[1, s] = distances / scale


def crps_from_sums(sums: np.ndarray, num_members: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard and the fair CRPS of a channel, or the two energy scores of a wind vector.

    Args:
        sums: (2 or more, ...) sums from `member_sums` or `vector_member_sums`, or area means of these sums. Only the
            first two rows are used: the summed distances of the members from the truth, and D (module docstring).
        num_members: number of members M.

    Returns:
        The standard and the fair score, each (...) and in the units of the field if `sums` are area means. The fair
        score is NaN for M = 1.
    """
    error = sums[0] / num_members
    distances = sums[1]
    # The fair score is not defined for a single member, so it is NaN.
    fair = np.full_like(error, np.nan)
    if num_members > 1:
        fair = error - distances / (num_members * (num_members - 1))
    return error - distances / num_members**2, fair
