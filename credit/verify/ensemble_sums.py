"""EnsembleSums: what the scores of an ensemble need of each case, beside those of its mean.

Shapes: N cases, L lead times, C channels, V wind vectors, X = C + V rows, R regions, M members, P cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.errors import DataError
from credit.verify.cell_means import CellMeans
from credit.verify.crps import crps_of_sorted, sorted_deviations
from credit.verify.energy import energy_score
from credit.verify.sums import ScoreSums


@dataclass
class EnsembleSums(ScoreSums):
    """The sums of an ensemble's mean, and area means over each case of what its members say, (N, L, X, R) each.

    Attributes:
        variance: unbiased variance over members (divided by M - 1); of a vector: summed over both components.
        crps: standard CRPS (`credit.verify.crps`); of a vector: energy score.
        crps_fair: fair CRPS; of a vector: fair energy score.
    """

    variance: np.ndarray
    crps: np.ndarray
    crps_fair: np.ndarray

    def crps_of_cases(self) -> np.ndarray:
        """See `ScoreSums.crps_of_cases`."""
        return self.crps

    def crps_fair_of_cases(self) -> np.ndarray:
        """See `ScoreSums.crps_fair_of_cases`."""
        return self.crps_fair

    def add_members(
        self, case: int, lead: int, means: CellMeans, members_MCP: np.ndarray, truth_CP: np.ndarray, what: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Enter the members of one field, whose mean goes to `add`.

        Beside its results it needs memory for a few thousand cells of all members.

        Args:
            case: number of the case.
            lead: number of the lead time.
            means: of the C channels.
            members_MCP: any float type, whatever where masked.
            truth_CP: whatever where masked.
            what: names the forecast and its time.

        Returns:
            How many members lie below the truth and how many equal it, both (C, P), for `RankHistogram`.

        Raises:
            DataError: if a value outside the mask is missing, or if there are not as many members as in other cases.
        """
        if len(members_MCP) != self.members:
            raise DataError(f"{what}: has {len(members_MCP)} members, other forecasts have {self.members}")
        variance, crps, crps_fair = (np.empty(truth_CP.size) for _ in range(3))
        below, equal = (np.empty(truth_CP.size, dtype=np.int32) for _ in range(2))
        valid = means.valid_CP.reshape(-1)
        for cells, deviation_nM in sorted_deviations(members_MCP, truth_CP):
            deviation_nM[~valid[cells]] = 0.0
            variance[cells] = deviation_nM.var(axis=1, ddof=1)
            crps[cells], crps_fair[cells] = crps_of_sorted(deviation_nM)
            below[cells], equal[cells] = (deviation_nM < 0).sum(axis=1), (deviation_nM == 0).sum(axis=1)
        if not np.isfinite(variance).all():
            channel = int(np.flatnonzero(~np.isfinite(variance))[0]) // truth_CP.shape[1]
            raise DataError(f"{what}: a member of {means.names[channel]} is not finite outside its mask")
        place, shape = (case, lead), truth_CP.shape
        self.variance[place] = means.with_vectors(means.mean(variance.reshape(shape)))
        energy, energy_fair = self._energy(means, members_MCP, truth_CP)
        self.crps[place] = np.concatenate([means.mean(crps.reshape(shape)), energy])
        self.crps_fair[place] = np.concatenate([means.mean(crps_fair.reshape(shape)), energy_fair])
        return below.reshape(shape), equal.reshape(shape)

    def _energy(self, means: CellMeans, members_MCP: np.ndarray, truth_CP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the standard and the fair energy score of the wind vectors, (V, R) each."""
        found = []
        for u, v in zip(means.u.tolist(), means.v.tolist(), strict=True):
            valid = means.valid_CP[u]
            scores = energy_score(members_MCP[:, [u, v]][:, :, valid], truth_CP[[u, v]][:, valid])
            whole = np.zeros((2, len(valid)))
            whole[:, valid] = scores
            found.append(whole)
        both = np.stack(found, axis=1) if found else np.zeros((2, 0, truth_CP.shape[1]))
        return means.vector_mean(both[0]), means.vector_mean(both[1])
