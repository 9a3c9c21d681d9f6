"""Climate: what values each cell has in a season of the training period, from times spread evenly over it.

A season is three months: that of the valid time and its two neighbours, of all years of the period. Over the whole year
the events "warmer than usual" would be those of summer, and skill that of knowing the season.

Shapes: C channels, K times of a season, P cells.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from credit.data.splits import Split
from credit.times import Clock

LEAST_TIMES = 20  # of a season
_TIMES = 400  # of the period, so that a season has 100: a frequency of 0.1 then has an error of 0.03
_MOST_BYTES = 1 << 30  # of the fields of a season
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0

# month, and minute of the day where times of the day are told apart
Season = tuple[int, int | None]


class Climate:
    """A sample of the training period's fields.

    Which times it is made of depends on the training period alone, not on the cases that are scored: two verifications
    of different cases have the same thresholds. One season is in memory at a time, and of fields so large that it would
    take more than 1 GB it has fewer times.

    Args:
        fields: minutes -> (C, P) of the training data.
        times: (N,) times that the data have.
        train: the training period.
        clock: of the times.
        by_hour: whether times of the day are told apart.
        wanted: valid times that it will be asked for.
        field_bytes: size of the fields of one time, float32.
    """

    def __init__(
        self,
        fields: Callable[[int], np.ndarray],
        times: np.ndarray,
        train: Split,
        clock: Clock,
        by_hour: bool,
        wanted: np.ndarray,
        field_bytes: int,
    ) -> None:
        self._fields, self._clock, self._by_hour = fields, clock, by_hour
        self._most = max(_MOST_BYTES // field_bytes, LEAST_TIMES)
        inside = times[(times >= train.first) & (times <= train.last)]
        hours = [inside[inside % 1440 == minute] for minute in np.unique(inside % 1440)] if by_hour else [inside]
        self._minutes = np.sort(np.concatenate([_spread(own, _TIMES) for own in hours] or [inside]))
        self._months = np.array([clock.datetime(minutes).month for minutes in self._minutes.tolist()], dtype=int)
        self.seasons = sorted({self.season(minutes) for minutes in np.unique(wanted).tolist()})

    def season(self, minutes: int) -> Season:
        """Return the season that a valid time belongs to."""
        return self._clock.datetime(minutes).month, minutes % 1440 if self._by_hour else None

    def times(self, season: Season) -> np.ndarray:
        """Return the times of a season, (K,) minutes."""
        month, minute = season
        chosen = np.isin((self._months - month) % 12, (0, 1, 11))
        if minute is not None:
            chosen &= self._minutes % 1440 == minute
        return _spread(self._minutes[chosen], self._most)

    def read(self, season: Season) -> np.ndarray:
        """Return the fields of a season, (C, K, P) float32."""
        return np.stack([self._fields(minutes).astype(np.float32) for minutes in self.times(season).tolist()], axis=1)

    def describe(self) -> str:
        """Return in words what it is made of."""
        counts = [len(self.times(season)) for season in self.seasons]
        many = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        hour = ", at the same hour of the day" if self._by_hour else ""
        return f"{many} times of the training period in the month of the valid time and its neighbours{hour}"


def _spread(times: np.ndarray, most: int) -> np.ndarray:
    """Return one of each of `most` equal stretches of `times`, at changing places, so that no hour is preferred."""
    if len(times) <= most:
        return times
    number = np.arange(most)
    return times[np.unique(((number + number * _GOLDEN % 1.0) * len(times) / most).astype(int))]
