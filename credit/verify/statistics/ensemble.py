"""EnsembleSums: what the scores of an ensemble need of each case, beside those of its mean.

Shapes: N cases, L lead times, C channels, V wind vectors, X = C + V rows, R regions, M members, P cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from credit.errors import DataError
from credit.verify.scores.crps import OF_MEMBERS, crps_of, member_sums
from credit.verify.scores.energy_score import vector_member_sums
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.deterministic import DeterministicStatistics
from credit.verify.statistics.error_moments import scale_of


@dataclass
class EnsembleStatistics(DeterministicStatistics):
    """The sums of an ensemble's mean, and area means over each case of what its members say, (N, L, X, R) each.

    Attributes:
        variance: unbiased variance over members (divided by M - 1); of a vector: summed over both components.
        crps: standard CRPS (`credit.verify.scores.crps`); of a vector: energy score.
        crps_fair: fair CRPS; of a vector: fair energy score.
    """

    variance: np.ndarray
    crps: np.ndarray
    crps_fair: np.ndarray

    def crps_of_cases(self) -> np.ndarray:
        """See `DeterministicStatistics.crps_of_cases`."""
        return self.crps

    def crps_fair_of_cases(self) -> np.ndarray:
        """See `DeterministicStatistics.crps_fair_of_cases`."""
        return self.crps_fair

    def add_members(
        self, case: int, lead: int, means: AreaMean, members_MCP: np.ndarray, truth_CP: np.ndarray, what: str
    ) -> np.ndarray:
        """Enter the members of one field, whose mean goes to `add`.

        Beside its results it needs memory for a channel of all members in each thread, where they do not lie side by
        side in memory.

        Args:
            case: number of the case.
            lead: number of the lead time.
            means: of the C channels.
            members_MCP: whatever where masked.
            truth_CP: whatever where masked.
            what: names the forecast and its time.

        Returns:
            The frequency of each of the truth's ranks among the members, (C, R, M + 1), for `RankHistogram`.

        Raises:
            DataError: if a value outside the mask is missing, or if there are not as many members as in other cases.
        """
        if len(members_MCP) != self.members:
            raise DataError(f"{what}: has {len(members_MCP)} members, other forecasts have {self.members}")
        fields = {f"{what}, member {number}": own for number, own in enumerate(members_MCP)}

        def of_channel(channel: int, out_KS: np.ndarray) -> None:
            own_MCP, (place,) = _in_order(members_MCP, [channel])
            member_sums(own_MCP, place, truth_CP[channel], means.valid_CP[channel], *means.stretches, out_KS)

        def of_vector(pair: Sequence[int], out_KS: np.ndarray) -> None:
            own_MCP, places = _in_order(members_MCP, pair)
            true = [means.cells(truth_CP, channel) for channel in pair]
            valid = means.valid_CP[pair[0]]
            vector_member_sums(own_MCP, places, *true, valid, scale_of(true), *means.stretches, out_KS)
            if not np.isfinite(out_KS).all():  # float32 may not hold it
                own, true = own_MCP[:, list(places)].astype(np.float64), [one.astype(np.float64) for one in true]
                vector_member_sums(own, (0, 1), *true, valid, scale_of(true), *means.stretches, out_KS)

        def add_up(channels: np.ndarray, rooms: np.ndarray, of_both: np.ndarray) -> None:
            for channel, room in zip(channels, rooms, strict=True):
                of_channel(channel, room)
            if len(of_both):
                of_vector(channels.tolist(), of_both)

        found, vectors = means.of_units((OF_MEMBERS + 1 + self.members, 2), add_up, fields)
        scores = zip(crps_of(found, self.members), crps_of(vectors, self.members), strict=True)
        place = case, lead
        self.crps[place], self.crps_fair[place] = (np.concatenate(both) for both in scores)
        self.variance[place] = means.with_vectors(found[2])
        return np.moveaxis(found[OF_MEMBERS:], 0, -1)


def _in_order(members_MCP: np.ndarray, channels: Sequence[int]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return members in the order of memory, of `channels` alone where they have to be copied, and their places."""
    if members_MCP.flags.c_contiguous:
        return members_MCP, tuple(channels)
    return np.ascontiguousarray(np.stack([members_MCP[:, channel] for channel in channels], 1)), tuple(
        range(len(channels))
    )
