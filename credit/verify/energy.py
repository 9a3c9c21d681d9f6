"""Energy score of vectors, such as the wind: the CRPS of several components at once.

Shapes: M members, D components, N cells.

With norms for absolute values it is the CRPS of `credit.verify.crps`, which it equals for D = 1 (Gneiting and Raftery
2007, doi:10.1198/016214506000001437)::

    ES = mean ||x_i - y|| - S / M^2,          S = sum over pairs i < j of ||x_i - x_j||

and the fair one has S / (M (M - 1)). Vectors have no order to sort by, so the time is O(M^2).
"""

from __future__ import annotations

import numpy as np

from credit.verify.crps import cell_blocks


def energy_score(members: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard and the fair energy score, in the units of the components; 0 is perfect.

    Beside its results it needs memory for a few thousand cells, of all members.

    Args:
        members: (M, D, ...); the D components have one unit, or have been divided by scales that make them alike.
        truth: (D, ...).

    Returns:
        Two arrays (...) float64. Of one member the standard score is the length of the error, the fair one NaN.
    """
    assert members.shape[1:] == truth.shape, (members.shape, truth.shape)
    count, shape = len(members), truth.shape[1:]
    members_MDN, truth_DN = members.reshape(*members.shape[:2], -1), truth.reshape(len(truth), -1)
    error, distances = np.zeros(truth_DN.shape[1]), np.zeros(truth_DN.shape[1])
    for cells in cell_blocks(truth_DN.shape[1]):
        block_MDN = members_MDN[:, :, cells].astype(np.float64)
        error[cells] = _lengths(block_MDN - truth_DN[:, cells]).mean(axis=0)
        for number in range(1, count):
            distances[cells] += _lengths(block_MDN[number:] - block_MDN[number - 1]).sum(axis=0)
    fair = error - distances / (count * (count - 1)) if count > 1 else np.full_like(error, np.nan)
    return (error - distances / count**2).reshape(shape), fair.reshape(shape)


def _lengths(vectors_MDN: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("mdn,mdn->mn", vectors_MDN, vectors_MDN))
