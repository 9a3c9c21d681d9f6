"""Times of the run, and the value of each variable that counts at each of them.

A source is ``exact`` (its values count at their own times), ``persist`` (a value counts until the next one, the last
value as long as the longest interval between two), or ``cyclic`` (a representative year: at every date counts the value
of this date in it, or the last one before).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from credit.calendar import Calendar
from credit.data.sources.accumulation import TimeAggregation
from credit.errors import DataError

logger = logging.getLogger(__name__)

_YEAR_MINUTES = 366 * 1440


def align_times(
    windows: Mapping[str, TimeAggregation], policies: Mapping[str, str], calendar: Calendar
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the times at which every variable has a value, and their indices in the times of each variable.

    Args:
        windows: variable -> its own times.
        policies: variable -> exact, persist or cyclic.
        calendar: the calendar.

    Raises:
        DataError: if there is no such time, or a representative year is longer than a year.
    """
    exact_times = [window.times for name, window in windows.items() if policies[name] == "exact"]
    times = np.unique(np.concatenate(exact_times))
    index_of: dict[str, np.ndarray] = {}
    for name, window in windows.items():
        if policies[name] == "exact":
            index = np.searchsorted(window.times, times)
            is_present = window.times[np.minimum(index, len(window.times) - 1)] == times
            index_of[name] = np.where(is_present, index, -1)
        elif policies[name] == "persist":
            index_of[name] = _persist(window.times, times)
        else:
            index_of[name] = _repeat_year(name, window.times, times, calendar)
    has_all = np.all([index >= 0 for index in index_of.values()], axis=0)
    if not has_all.any():
        spans = []
        for name, window in windows.items():
            first = calendar.format(window.times[0])
            last = calendar.format(window.times[-1])
            spans.append(f"{name} {first}..{last} ({len(window.times)} times)")
        raise DataError(f"data.sources: the variables have no time in common: {'; '.join(spans)}")
    if not has_all.all():
        incomplete = ", ".join(name for name, index in index_of.items() if (index < 0).any())
        logger.warning(
            "%d of %d times are left out, because %s do not have them", int((~has_all).sum()), len(times), incomplete
        )
    return times[has_all], {name: index[has_all] for name, index in index_of.items()}


def _persist(source_times: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the index of the last value before or at each time, -1 if it is older than the longest interval."""
    index = np.searchsorted(source_times, times, side="right") - 1
    longest_interval = int(np.diff(source_times).max()) if len(source_times) > 1 else 0
    age = times - source_times[index]
    return np.where((index >= 0) & (age <= longest_interval), index, -1)


def _repeat_year(name: str, source_times: np.ndarray, times: np.ndarray, calendar: Calendar) -> np.ndarray:
    """Return the index of the value for each date in a representative year."""
    if source_times[-1] - source_times[0] >= _YEAR_MINUTES:
        raise DataError(
            f"data.sources: {name} is from a source with times: cyclic, which is for one representative year, but its "
            f"times run from {calendar.format(source_times[0])} to {calendar.format(source_times[-1])}; cut them to a "
            "year, or set times: exact"
        )
    source_dates = np.array([_date_number(calendar, minutes) for minutes in source_times])
    dates = np.array([_date_number(calendar, minutes) for minutes in times])
    order = np.argsort(source_dates, kind="stable")
    rank = np.searchsorted(source_dates[order], dates, side="right") - 1
    # A date before the first one of the year has rank -1, which is the last value of the year.
    return order[rank]


def _date_number(calendar: Calendar, minutes: int) -> int:
    """Return month, day, hour and minute as one number that increases through the year."""
    date = calendar.datetime(minutes)
    return ((date.month * 100 + date.day) * 100 + date.hour) * 100 + date.minute
