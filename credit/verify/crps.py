"""Continuous ranked probability score of an ensemble, cell by cell.

Shapes: M members, N cells.

With the members x_i and the truth y, the kernel form (Gneiting and Raftery 2007, doi:10.1198/016214506000001437) is::

    CRPS = mean |x_i - y| - D / M^2,          D = sum over pairs i < j of |x_i - x_j|

This is the score of the ensemble's own empirical distribution. Its expectation depends on M: an ensemble drawn from
the distribution F scores worse than F by 1 / (2 M) of the mean distance of two draws. The fair score (Ferro 2014,
doi:10.1002/qj.2270) takes D / (M (M - 1)) instead, whose expectation is that of F for every M.

Of sorted values, D = sum over k = 1 .. M of (2 k - M - 1) x_(k), so that no pair is ever formed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# 4096 cells of 50 members are 1.6 MB
_CELLS = 4096


def ensemble_crps(members: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard and the fair CRPS, in the units of the fields; 0 is perfect.

    Beside its results it needs memory for a few thousand cells, of all members; the time is O(M log M).

    Args:
        members: (M, ...), any float type.
        truth: (...).

    Returns:
        Two arrays (...) float64, NaN where a value is. Of one member the standard score is the absolute error, and
        the fair one, which needs two, is NaN.
    """
    standard, fair = np.empty(truth.size), np.empty(truth.size)
    for cells, deviation_NM in sorted_deviations(members, truth):
        standard[cells], fair[cells] = crps_of_sorted(deviation_NM)
    return standard.reshape(truth.shape), fair.reshape(truth.shape)


def sorted_deviations(members: np.ndarray, truth: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield (which cells of the flattened `truth`, members minus truth, sorted, (n, M) float64), block by block.

    Of deviations instead of the values themselves, small differences of large numbers are exact.
    """
    assert members.shape[1:] == truth.shape, (members.shape, truth.shape)
    members_MN, truth_N = members.reshape(len(members), -1), truth.reshape(-1)
    for cells in cell_blocks(truth_N.size):
        deviation_NM = np.subtract(members_MN[:, cells].T, truth_N[cells, None], dtype=np.float64, order="C")
        deviation_NM.sort(axis=1)
        yield cells, deviation_NM


def cell_blocks(count: int) -> Iterator[slice]:
    """Yield slices that cover `count` cells, each few enough to be worked on in a core's cache."""
    for start in range(0, count, _CELLS):
        yield slice(start, min(start + _CELLS, count))


def crps_of_sorted(deviation_NM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard and the fair CRPS, (N,) each, of `sorted_deviations`."""
    count = deviation_NM.shape[1]
    error = np.abs(deviation_NM).mean(axis=1)
    distances = deviation_NM @ (2.0 * np.arange(1, count + 1) - count - 1.0)
    fair = error - distances / (count * (count - 1)) if count > 1 else np.full_like(error, np.nan)
    return error - distances / count**2, fair
