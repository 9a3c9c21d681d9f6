"""The run's times, and which value of each variable counts at each of them.

A source is ``exact`` (its values count at their own times), ``persist`` (a value counts until the next one; the last
one as long as the longest distance between two), or ``cyclic`` (a representative year: at every date the value of this
date in it, or the last one before).
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
    """Return the times at which every variable has a value, and the place of it among each variable's own.

    Args:
        windows: variable -> its own times.
        policies: variable -> exact, persist or cyclic.
        calendar: the calendar.

    Raises:
        DataError: if there is no such time, or a representative year is longer than a year.
    """
    exact = {name: own.times for name, own in windows.items() if policies[name] == "exact"}
    every = np.unique(np.concatenate(list(exact.values())))
    places: dict[str, np.ndarray] = {}
    for name, own in windows.items():
        if policies[name] == "exact":
            place = np.searchsorted(own.times, every)
            found = own.times[np.minimum(place, len(own.times) - 1)] == every
            places[name] = np.where(found, place, -1)
        elif policies[name] == "persist":
            places[name] = _held(own.times, every)
        else:
            places[name] = _repeated(name, own.times, every, calendar)
    there = np.all([place >= 0 for place in places.values()], axis=0)
    if not there.any():
        spans = (
            f"{name} {calendar.format(own.times[0])}..{calendar.format(own.times[-1])} ({len(own.times)} times)"
            for name, own in windows.items()
        )
        raise DataError(f"data.sources: the variables have no time in common: {'; '.join(spans)}")
    if not there.all():
        short = ", ".join(name for name, place in places.items() if (place < 0).any())
        logger.warning(
            "%d of %d times are left out, because %s do not have them", int((~there).sum()), len(there), short
        )
    return every[there], {name: place[there] for name, place in places.items()}


def _held(own: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the place of the last value before or at each time, -1 where it is older than the values are apart."""
    place = np.searchsorted(own, wanted, side="right") - 1
    longest = int(np.diff(own).max()) if len(own) > 1 else 0
    return np.where((place >= 0) & (wanted - own[place] <= longest), place, -1)


def _repeated(name: str, own: np.ndarray, wanted: np.ndarray, calendar: Calendar) -> np.ndarray:
    """Return the place of each date's value in a representative year."""
    if own[-1] - own[0] >= _YEAR_MINUTES:
        raise DataError(
            f"data.sources: {name} is from a source with times: cyclic, which is for one representative year, but its "
            f"times run from {calendar.format(own[0])} to {calendar.format(own[-1])}; cut them to a year, or set "
            "times: exact"
        )
    dates = np.array([_date(calendar, minutes) for minutes in own])
    order = np.argsort(dates, kind="stable")
    place = np.searchsorted(dates[order], [_date(calendar, minutes) for minutes in wanted], side="right") - 1
    return order[place]  # what is before the first date of the year has the last one's value, place -1


def _date(calendar: Calendar, minutes: int) -> int:
    """Return month, day, hour and minute as one number that rises through the year."""
    date = calendar.datetime(minutes)
    return ((date.month * 100 + date.day) * 100 + date.hour) * 100 + date.minute
