"""Times of the run, and the value of each variable that counts at each of them.

The policy of a source (``data.sources.N.times``) decides:

- ``exact``: a value counts at its own time only;
- ``persist``: a value counts until the next one, and the last value as long as the longest interval between two;
- ``cyclic``: the source has one representative year. On every date the value of this date counts, or the last value
  before it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig
from credit.data.sources.accumulation import TimeAggregation
from credit.data.sources.series import group_by_source
from credit.data.sources.source_index import SourceIndex
from credit.errors import DataError

logger = logging.getLogger(__name__)

# The longest year.
_YEAR_MINUTES = 366 * 1440


def align_times(
    aggregations: Mapping[str, TimeAggregation], policies: Mapping[str, str], calendar: Calendar
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the times at which every variable has a value, and the value of each variable that counts there.

    Args:
        aggregations: variable -> its values over time; the attribute ``times`` is used.
        policies: variable -> ``exact``, ``persist`` or ``cyclic``; at least one is ``exact``.
        calendar: calendar of the times.

    Returns:
        The times, (N,) int64 minutes, and variable -> (N,) indices in the times of its aggregation.

    Raises:
        DataError: if there is no such time, or a representative year is longer than a year.
    """
    # Exact variables decide the times of the run; other variables only have to have a value at these times.
    exact_times = [aggregation.times for name, aggregation in aggregations.items() if policies[name] == "exact"]
    times = np.unique(np.concatenate(exact_times))
    # Variable -> index of the value that counts at each time; -1 where none does.
    index_of: dict[str, np.ndarray] = {}
    for name, aggregation in aggregations.items():
        variable_times = aggregation.times
        if policies[name] == "exact":
            index = np.searchsorted(variable_times, times)
            is_present = variable_times[np.minimum(index, len(variable_times) - 1)] == times
            index_of[name] = np.where(is_present, index, -1)
        elif policies[name] == "persist":
            index_of[name] = _find_persisting_values(variable_times, times)
        else:
            index_of[name] = _find_values_of_year(name, variable_times, times, calendar)
    # A time counts if every variable has a value.
    has_all = np.all([index >= 0 for index in index_of.values()], axis=0)
    if not has_all.any():
        spans = []
        for name, aggregation in aggregations.items():
            first = calendar.format(aggregation.times[0])
            last = calendar.format(aggregation.times[-1])
            spans.append(f"{name} {first}..{last} ({len(aggregation.times)} times)")
        raise DataError(
            f"data.sources: the variables have no time in common: {'; '.join(spans)}; name files of one period"
        )
    if not has_all.all():
        incomplete = ", ".join(name for name, index in index_of.items() if (index < 0).any())
        logger.warning(
            "%d of %d times are left out, because %s do not have them", int((~has_all).sum()), len(times), incomplete
        )
    return times[has_all], {name: index[has_all] for name, index in index_of.items()}


def find_policy(name: str, source_index: SourceIndex, conf: DataConfig) -> tuple[int, str]:
    """Return the index of the first source of a variable, and the policy (``times``) that all its sources have.

    Args:
        name: the variable.
        source_index: contents of the sources.
        conf: the ``data`` section of the config.

    Raises:
        DataError: if two sources differ.
    """
    numbers = [variables[0].source_number for variables in group_by_source(source_index.file_variables[name])]
    first = numbers[0]
    for number in numbers[1:]:
        if conf.sources[number].times != conf.sources[first].times:
            raise DataError(
                f"{name} is in data.sources {first} and {number}, whose times are {conf.sources[first].times} and "
                f"{conf.sources[number].times}; the sources of a variable must have the same"
            )
    return first, conf.sources[first].times


def _find_persisting_values(source_times: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the index of the last value before or at each time, -1 if it is older than the longest interval.

    Args:
        source_times: (M,) minutes of the values, increasing.
        times: (N,) minutes since 1900 of the times of the run.

    Returns:
        (N,) indices in `source_times`.
    """
    index = np.searchsorted(source_times, times, side="right") - 1
    longest_interval = 0
    if len(source_times) > 1:
        longest_interval = int(np.diff(source_times).max())
    age = times - source_times[index]
    return np.where((index >= 0) & (age <= longest_interval), index, -1)


def _find_values_of_year(name: str, source_times: np.ndarray, times: np.ndarray, calendar: Calendar) -> np.ndarray:
    """Return the index of the value that a representative year has for each time of the run, (N,) int64.

    Args:
        name: the variable, for messages.
        source_times: (M,) minutes of the values, within a year.
        times: (N,) minutes since 1900 of the times of the run.
        calendar: calendar of both.

    Raises:
        DataError: if the values cover more than a year.
    """
    if source_times[-1] - source_times[0] >= _YEAR_MINUTES:
        raise DataError(
            f"data.sources: {name} is from a source with times: cyclic, which is for one representative year, but its "
            f"times run from {calendar.format(source_times[0])} to {calendar.format(source_times[-1])}; cut them to a "
            "year, or set times: exact"
        )
    source_dates = np.array([_encode_date(calendar, minutes) for minutes in source_times])
    dates = np.array([_encode_date(calendar, minutes) for minutes in times])
    order = np.argsort(source_dates, kind="stable")
    rank = np.searchsorted(source_dates[order], dates, side="right") - 1
    # A date before the first one of the year has rank -1, which selects the last value of the year.
    return order[rank]


def _encode_date(calendar: Calendar, minutes: int) -> int:
    """Return month, day, hour and minute of a time as one number MMDDhhmm, which increases through the year."""
    date = calendar.datetime(minutes)
    return ((date.month * 100 + date.day) * 100 + date.hour) * 100 + date.minute
