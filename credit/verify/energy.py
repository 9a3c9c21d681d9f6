"""Energy score of vectors, such as the wind: the CRPS of several components at once.

Shapes: L lead times, C vectors, R regions (`credit.verify.sums.REGIONS`), M members, D components, N cells.

With norms for absolute values it is the CRPS of `credit.verify.crps`, which it equals for D = 1 (Gneiting and Raftery
2007, doi:10.1198/016214506000001437)::

    ES = mean ||x_i - y|| - S / M^2,          S = sum over pairs i < j of ||x_i - x_j||

and the fair one has S / (M (M - 1)). Vectors have no order to sort by, so the time is O(M^2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.verify.addable import AddableSums, require_members
from credit.verify.crps import cell_blocks
from credit.verify.sums import REGIONS, CellMeans


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


@dataclass
class EnergySums(AddableSums):
    """Sums over cases of the energy score of C vectors, each (L, C, R) float64.

    Attributes:
        members: number of members M, the same in all cases.
        energy: standard energy score.
        energy_fair: fair energy score.
    """

    members: int
    energy: np.ndarray
    energy_fair: np.ndarray

    @classmethod
    def zeros(cls, leads: int, vectors: int, members: int) -> EnergySums:
        """Return empty sums."""
        sums = (np.zeros((leads, vectors, len(REGIONS))) for _ in range(2))
        return cls(np.zeros(leads, dtype=np.int64), members, *sums)

    def add(self, lead: int, means: CellMeans, members_MDCN: np.ndarray, truth_DCN: np.ndarray) -> None:
        """Add one case at one lead time.

        Args:
            lead: index of the lead time.
            means: with one channel for each vector; all components of a vector are masked where this channel is.
            members_MDCN: the members' components, 0 where masked.
            truth_DCN: the truth's.

        Raises:
            DataError: if there are not as many members as the sums are for.
        """
        require_members(self.members, len(members_MDCN))
        standard, fair = energy_score(members_MDCN, truth_DCN)
        self.energy[lead] += means.mean(standard)
        self.energy_fair[lead] += means.mean(fair)
        self.cases[lead] += 1

    def metrics(self) -> dict[str, np.ndarray]:
        """Return metric -> (L, C, R): ``energy_score`` and ``energy_score_fair`` (NaN of one member)."""
        return {"energy_score": self.average(self.energy), "energy_score_fair": self.average(self.energy_fair)}
