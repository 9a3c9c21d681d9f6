"""Climate: what values each cell has at a time of the year, from times spread evenly over the training period.

The times within 30 days of the time of the year, of all years of the period, make it. Over the whole year the events
"warmer than usual" would be those of summer, and skill that of knowing the season.

Shapes: C channels, K times, P cells.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from credit.calendar import Calendar
from credit.data.splits import Split

LEAST_TIMES = 20
WITHIN_DAYS = 30
_TIMES = 400  # of the period, so that 30 days on both sides have 67: a frequency of 0.1 then has an error of 0.04
_MOST_BYTES = 1 << 30  # of fields that are kept
_PARTS = 73  # of the year, five days each, whose times have one climate
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0

# part of the year, and minute of the day where times of the day are told apart
Season = tuple[int, int | None]


class ClimatologicalSample:
    """A sample of the training period's fields.

    Which times it is made of depends on the training period alone, not on the cases that are scored: two verifications
    of different cases have the same thresholds. It keeps at most 1 GB of what it has read, and where the fields are so
    large that those of one season would take more, a season has fewer times.

    Args:
        fields: minutes -> (C, P) of the training data.
        times: (N,) times that the data have.
        train: the training period.
        calendar: of the times.
        by_hour: whether times of the day are told apart.
        field_bytes: size of the fields of one time, float32.
    """

    def __init__(
        self,
        fields: Callable[[int], np.ndarray],
        times: np.ndarray,
        train: Split,
        calendar: Calendar,
        by_hour: bool,
        field_bytes: int,
    ) -> None:
        self._calendar, self._by_hour = calendar, by_hour
        self._most = max(_MOST_BYTES // field_bytes, LEAST_TIMES)
        # seasons that follow one another share most of their times
        self._fields = lru_cache(maxsize=self._most)(lambda minutes: fields(minutes).astype(np.float32))
        inside = times[(times >= train.first) & (times <= train.last)]
        hours = [inside[inside % 1440 == minute] for minute in np.unique(inside % 1440)] if by_hour else [inside]
        self._minutes = np.sort(np.concatenate([_spread(own, _TIMES) for own in hours] or [inside]))
        self._fractions = calendar.year_fraction(self._minutes)

    def season(self, minutes: int) -> Season:
        """Return the season that a valid time belongs to."""
        fraction = float(self._calendar.year_fraction(np.array(minutes)))
        return int(fraction * _PARTS), minutes % 1440 if self._by_hour else None

    def times(self, season: Season) -> np.ndarray:
        """Return the times of a season, (K,) minutes."""
        part, minute = season
        apart = np.abs(self._fractions - (part + 0.5) / _PARTS)
        chosen = np.minimum(apart, 1.0 - apart) <= WITHIN_DAYS / 365.0
        if minute is not None:
            chosen &= self._minutes % 1440 == minute
        return _spread(self._minutes[chosen], self._most)

    def read(self, season: Season) -> np.ndarray:
        """Return the fields of a season, (C, K, P) float32."""
        return np.stack([self._fields(minutes) for minutes in self.times(season).tolist()], axis=1)

    def fewest(self, valid_times: np.ndarray) -> tuple[int, int]:
        """Return the fewest times that a season of these has, and one of these times with so few."""
        seasons = {self.season(minutes): minutes for minutes in valid_times.tolist()}
        return min((len(self.times(season)), minutes) for season, minutes in seasons.items())


def _spread(times: np.ndarray, most: int) -> np.ndarray:
    """Return one of each of `most` equal stretches of `times`, at changing places, so that no hour is preferred."""
    if len(times) <= most:
        return times
    number = np.arange(most)
    return times[np.unique(((number + number * _GOLDEN % 1.0) * len(times) / most).astype(int))]
