"""EnsembleSums: what the scores of an ensemble need of each case, beside those of its mean.

Shapes: N cases, L lead times, C channels, V wind vectors, X = C + V rows, R regions, M members, P cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.errors import DataError
from credit.verify.cell_means import CellMeans
from credit.verify.crps import OF_MEMBERS, crps_of, member_sums
from credit.verify.energy import vector_member_sums
from credit.verify.field_sums import scale_of
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
    ) -> np.ndarray:
        """Enter the members of one field, whose mean goes to `add`.

        Beside its results it needs memory for a few cells of all members.

        Args:
            case: number of the case.
            lead: number of the lead time.
            means: of the C channels.
            members_MCP: any float type, whatever where masked.
            truth_CP: whatever where masked.
            what: names the forecast and its time.

        Returns:
            The frequency of each of the truth's ranks among the members, (C, R, M + 1), for `RankHistogram`.

        Raises:
            DataError: if a value outside the mask is missing, or if there are not as many members as in other cases.
        """
        if len(members_MCP) != self.members:
            raise DataError(f"{what}: has {len(members_MCP)} members, other forecasts have {self.members}")
        members_MCP = np.ascontiguousarray(members_MCP)
        fields = {f"{what}, member {number}": own for number, own in enumerate(members_MCP)}

        def of_channel(channel: int, out_KS: np.ndarray) -> None:
            valid_P = means.valid_CP[channel]
            member_sums(members_MCP, channel, truth_CP[channel], valid_P, *means.stretches, out_KS)

        def of_vector(vector: int, out_KS: np.ndarray) -> None:
            pair = means.winds[vector]
            true = [means.cells(truth_CP, channel) for channel in pair]
            known = *true, means.valid_CP[pair[0]], scale_of(true)
            vector_member_sums(members_MCP, pair, *known, *means.stretches, out_KS)

        found = means.of_channels(OF_MEMBERS + 1 + self.members, of_channel, fields)
        vectors = means.of_vectors(2, of_vector, fields)
        scores = zip(crps_of(found, self.members), crps_of(vectors, self.members), strict=True)
        place = case, lead
        self.crps[place], self.crps_fair[place] = (np.concatenate(both) for both in scores)
        self.variance[place] = means.with_vectors(found[2])
        return np.moveaxis(found[OF_MEMBERS:], 0, -1)
