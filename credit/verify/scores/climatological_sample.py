"""Sample of the climate of each cell for each time of the year, from times at equal intervals of the training period.

The year is divided into 73 seasons of five days. The sample of a season consists of times in all years of the training
period that are within 30 days of the middle of the season. With a single sample for the complete year, the event
"warmer than usual" would occur mostly in summer. A forecast that only depends on the season would then have skill.

Shapes: N times of the data, C channels, K times in the sample of a season, H x W = P cells.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from credit.calendar import Calendar
from credit.data.splits import Split

# Smallest number of times in the sample of a season. Quantiles of fewer times would be too uncertain.
MIN_TIMES = 20
# Largest distance in days between a time in the sample of a season and the middle of the season.
WITHIN_DAYS = 30
# Number of times in the sample of the complete training period. The sample of a season then has 67 times, so a
# frequency of 0.1 is estimated with an error of 0.04.
_MAX_TIMES = 400
# Size of the cache of fields in bytes.
_CACHE_BYTES = 1 << 30
# Number of seasons of a year; all times of a season of five days share one sample.
_SEASONS = 73
_GOLDEN_RATIO = (np.sqrt(5.0) - 1.0) / 2.0

# (index of the season from 0 to 72, minute of the day); the minute is None if all hours of the day share a sample.
Season = tuple[int, int | None]


class ClimatologicalSample:
    """Sample of the fields of the training period for each season and, if requested, each hour of the day.

    The sampled times depend only on the training period and not on the scored cases, so verifications of different
    cases use the same thresholds. At most 1 GiB of fields is cached. If the fields of a season need more memory, the
    sample of the season has fewer times.

    Args:
        fields: function of a time in minutes that returns the training data, (C, P) in the units of the data.
        times: (N,) times of the data in minutes.
        train: the training period.
        calendar: calendar of the times.
        by_hour: True if each hour of the day has a separate sample, False if all hours share one sample.
        field_bytes: size in bytes of the C fields of one time as float32.
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

        def read_float32(minutes: int) -> np.ndarray:
            return fields(minutes).astype(np.float32)

        # Consecutive seasons share most of their times, so a cache with the size of one season is sufficient.
        self._read_cached = lru_cache(maxsize=self._max_season_times)(read_float32)
        train_times = times[(times >= train.first) & (times <= train.last)]
        self._minutes = self._sample_times(train_times)
        self._year_fractions = calendar.year_fraction(self._minutes)

    def _sample_times(self, train_times: np.ndarray) -> np.ndarray:
        """Return the sampled times in minutes, increasing.

        There are at most 400 times. If each hour of the day has a separate sample, there are at most 400 times for each
        hour.

        Args:
            train_times: times of the training period in minutes, increasing.
        """
        if not self._by_hour or not len(train_times):
            return _select_evenly(train_times, _MAX_TIMES)
        minutes_of_day = train_times % 1440
        samples = []
        for minute in np.unique(minutes_of_day):
            samples.append(_select_evenly(train_times[minutes_of_day == minute], _MAX_TIMES))
        return np.sort(np.concatenate(samples))

    def season_of(self, minutes: int) -> Season:
        """Return the season of a valid time in minutes: (index of the season, minute of the day).

        The minute is None if all hours of the day share one sample.
        """
        fraction = float(self._calendar.year_fraction(np.array(minutes)))
        minute_of_day = None
        if self._by_hour:
            minute_of_day = minutes % 1440
        return int(fraction * _SEASONS), minute_of_day

    def season_times(self, season: Season) -> np.ndarray:
        """Return the times in the sample of a season, (K,) in minutes, increasing."""
        number, minute_of_day = season
        # The distance is cyclic, because the end of December is near the beginning of January.
        distance = np.abs(self._year_fractions - (number + 0.5) / _SEASONS)
        is_near = np.minimum(distance, 1.0 - distance) <= WITHIN_DAYS / 365.0
        if minute_of_day is not None:
            is_near &= self._minutes % 1440 == minute_of_day
        return _select_evenly(self._minutes[is_near], self._max_season_times)

    def read_season(self, season: Season) -> np.ndarray:
        """Return the fields at the K times in the sample of a season, (C, K, P) float32 in the units of the data."""
        season_times = self.season_times(season).tolist()
        return np.stack([self._read_cached(minutes) for minutes in season_times], axis=1)

    def smallest_season(self, valid_times: np.ndarray) -> tuple[int, int]:
        """Return the number of times in the smallest sample of all seasons of the given valid times.

        Args:
            valid_times: valid times in minutes, a one-dimensional array.

        Returns:
            (number of times in the smallest sample, a valid time in the season of this sample).
        """
        valid_time_by_season = {self.season_of(minutes): minutes for minutes in valid_times.tolist()}
        sizes = []
        for season, minutes in valid_time_by_season.items():
            sizes.append((len(self.season_times(season)), minutes))
        return min(sizes)


def _select_evenly(times: np.ndarray, max_times: int) -> np.ndarray:
    """Return at most `max_times` of the given times, evenly distributed.

    The times are divided into `max_times` equal intervals, and one time is selected from each interval. From interval
    to interval, the position of this time within the interval moves by the golden ratio, so that no hour of the day is
    preferred.

    Args:
        times: times in minutes, increasing.
        max_times: largest number of times.
    """
    if len(times) <= max_times:
        return times
    # Each interval has a number, and a position within the interval from 0 to 1.
    number = np.arange(max_times)
    offset = number * _GOLDEN_RATIO % 1.0
    position = (number + offset) * len(times) / max_times
    return times[np.unique(position.astype(int))]
