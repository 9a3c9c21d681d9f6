"""Climate: what values each cell has in a season of the training period, from times spread evenly over it.

A season is three months: that of the valid time and its two neighbours, of all years of the period. Over the whole year
the events "warmer than usual" would be those of summer, and skill that of knowing the season.

Shapes: C channels, S times of the sample, K times of a season, P cells.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from credit.data.splits import Split
from credit.times import Clock

LEAST_TIMES = 20  # of a season
_TIMES = 400  # of the period, so that a season has 100: a frequency of 0.1 then has an error of 0.03
_MOST_BYTES = 1 << 30
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0

# month, and minute of the day where times of the day are told apart
Season = tuple[int, int | None]


class Climate:
    """A sample of the training period's fields.

    Which times it is made of depends on the training period alone, not on the cases that are scored: two verifications
    of different cases have the same thresholds.

    Args:
        fields: minutes -> (C, P) of the training data, from `CellMeans.flatten`.
        times: (N,) times that the data have.
        train: the training period.
        clock: of the times.
        by_hour: whether times of the day are told apart.
        wanted: valid times that it will be asked for; what none of them needs is not read.
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
        self._clock, self._by_hour = clock, by_hour
        inside = times[(times >= train.first) & (times <= train.last)]
        hours = [inside[inside % 1440 == minute] for minute in np.unique(inside % 1440)] if by_hour else [inside]
        most = min(_TIMES, max(_MOST_BYTES // field_bytes, LEAST_TIMES) // max(len(hours), 1))
        sample = np.sort(np.concatenate([_spread(own, most) for own in hours] or [inside]))
        months = np.array([clock.datetime(minutes).month for minutes in sample.tolist()], dtype=int)
        self.seasons = sorted({self.season(minutes) for minutes in np.unique(wanted).tolist()})
        needed = np.zeros(len(sample), dtype=bool)
        for month in {month for month, _ in self.seasons}:
            needed |= _is_near(months, month)
        self._minutes, self._months = sample[needed], months[needed]
        self._fields_CSP: np.ndarray | None = None
        self._read = fields

    def season(self, minutes: int) -> Season:
        """Return the season that a valid time belongs to."""
        return self._clock.datetime(minutes).month, minutes % 1440 if self._by_hour else None

    def count(self, season: Season) -> int:
        """Return how many times of the sample a season has."""
        return int(self._belong(season).sum())

    def values(self, channel: int, season: Season) -> np.ndarray:
        """Return the values of one of the channels in a season, (K, P) float32; reads the sample when first called."""
        if self._fields_CSP is None:
            bar = tqdm(self._minutes.tolist(), "climate", disable=None)
            fields = [self._read(minutes).astype(np.float32) for minutes in bar]
            self._fields_CSP = np.stack(fields, axis=1)
        return self._fields_CSP[channel, self._belong(season)]

    def describe(self) -> str:
        """Return in words what it is made of."""
        counts = [self.count(season) for season in self.seasons]
        many = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        hour = ", the same hour of the day" if self._by_hour else ""
        return f"{many} times of the training period, from the month of the valid time and its neighbours{hour}"

    def _belong(self, season: Season) -> np.ndarray:
        month, minute = season
        chosen = _is_near(self._months, month)
        return chosen if minute is None else chosen & (self._minutes % 1440 == minute)


def _is_near(months: np.ndarray, month: int) -> np.ndarray:
    return np.isin((months - month) % 12, (0, 1, 11))


def _spread(times: np.ndarray, most: int) -> np.ndarray:
    """Return one of each of `most` equal stretches of `times`, at changing places, so that no hour is preferred."""
    if len(times) <= most:
        return times
    number = np.arange(most)
    return times[np.unique(((number + number * _GOLDEN % 1.0) * len(times) / most).astype(int))]
