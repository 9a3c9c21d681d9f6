"""A sample of the climate of each cell at a time of the year, from times spread evenly over the training period.

A season is a stretch of five days. Its sample has the times of all years of the period that are within 30 days of its
middle. With one sample for the whole year, the event "warmer than usual" would mean summer, and a forecast that only
knows the season would have skill.

Shapes: C channels, K times, P cells.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from credit.calendar import Calendar
from credit.data.splits import Split

# A climate of fewer times has too uncertain quantiles.
MIN_TIMES = 20
# Times of a season lie within this many days of its middle.
WITHIN_DAYS = 30
# Times of the period. Then 30 days on both sides have 67, and a frequency of 0.1 has an error of 0.04.
_MAX_TIMES = 400
# Memory in bytes for cached fields.
_CACHE_BYTES = 1 << 30
# Number of seasons of a year; the times of five days share one sample.
_SEASONS = 73
_GOLDEN_RATIO = (np.sqrt(5.0) - 1.0) / 2.0

# Number of the season, and minute of the day; None if all hours of the day share a sample.
Season = tuple[int, int | None]


class ClimatologicalSample:
    """A sample of the fields of the training period, for each season and perhaps each hour of the day.

    The times of the sample depend on the training period alone, not on the cases that are scored. So verifications of
    different cases have the same thresholds. At most 1 GiB of fields is cached. If the fields of one season would take
    more, a season has fewer times.

    Args:
        fields: function of a time in minutes that returns the training data, (C, P) in the units of the data.
        times: (N,) times of the data in minutes.
        train: the training period.
        calendar: calendar of the times.
        by_hour: True if each hour of the day has a sample of its own.
        field_bytes: size of the fields of one time as float32, in bytes.
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
        self._calendar = calendar
        self._by_hour = by_hour
        self._max_season_times = max(_CACHE_BYTES // field_bytes, MIN_TIMES)
        # Consecutive seasons share most of their times, so a cache of one season's size serves them.
        cache = lru_cache(maxsize=self._max_season_times)
        self._read_cached = cache(lambda minutes: fields(minutes).astype(np.float32))
        train_times = times[(times >= train.first) & (times <= train.last)]
        self._minutes = self._sample_times(train_times)
        self._year_fractions = calendar.year_fraction(self._minutes)

    def _sample_times(self, train_times: np.ndarray) -> np.ndarray:
        """Return the times of the sample in minutes, increasing.

        There are at most 400 or, if hours of the day have samples of their own, at most 400 of each hour.

        Args:
            train_times: times of the training period in minutes, increasing.
        """
        if not self._by_hour or not len(train_times):
            return _spread(train_times, _MAX_TIMES)
        minutes_of_day = train_times % 1440
        samples = []
        for minute in np.unique(minutes_of_day):
            samples.append(_spread(train_times[minutes_of_day == minute], _MAX_TIMES))
        return np.sort(np.concatenate(samples))

    def season_of(self, minutes: int) -> Season:
        """Return the season of a valid time in minutes."""
        fraction = float(self._calendar.year_fraction(np.array(minutes)))
        minute_of_day = None
        if self._by_hour:
            minute_of_day = minutes % 1440
        return int(fraction * _SEASONS), minute_of_day

    def season_times(self, season: Season) -> np.ndarray:
        """Return the times of a season, (K,) minutes."""
        number, minute_of_day = season
        # The year is a circle: the end of December is near the beginning of January.
        distance = np.abs(self._year_fractions - (number + 0.5) / _SEASONS)
        is_near = np.minimum(distance, 1.0 - distance) <= WITHIN_DAYS / 365.0
        if minute_of_day is not None:
            is_near &= self._minutes % 1440 == minute_of_day
        return _spread(self._minutes[is_near], self._max_season_times)

    def read_season(self, season: Season) -> np.ndarray:
        """Return the fields of a season at its K times, (C, K, P) float32 in the units of the data."""
        return np.stack([self._read_cached(minutes) for minutes in self.season_times(season).tolist()], axis=1)

    def smallest_season(self, valid_times: np.ndarray) -> tuple[int, int]:
        """Return the size of the smallest sample among the seasons of `valid_times`, and a valid time in that season.

        Args:
            valid_times: (N,) valid times in minutes.
        """
        valid_time_by_season = {self.season_of(minutes): minutes for minutes in valid_times.tolist()}
        sizes = []
        for season, minutes in valid_time_by_season.items():
            sizes.append((len(self.season_times(season)), minutes))
        return min(sizes)


def _spread(times: np.ndarray, max_times: int) -> np.ndarray:
    """Return at most `max_times` of the given times: one of each of as many equal stretches.

    The position of a time in its stretch follows the golden ratio, so that no hour of the day is preferred.
    """
    if len(times) <= max_times:
        return times
    number = np.arange(max_times)
    position = (number + number * _GOLDEN_RATIO % 1.0) * len(times) / max_times
    return times[np.unique(position.astype(int))]
