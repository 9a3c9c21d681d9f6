"""Times of the run, and the selection of the value of each variable at each time.

The policy of a source (``data.sources.N.times``) determines the selection:

- ``exact``: a value is used only at its time;
- ``persist``: a value is used until the next value. The last value is used for the longest interval between two values;
- ``cyclic``: the source has one representative year. In every year, the value of the same date is used, or the last
  value before this date.
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


def align_times(
    aggregations: Mapping[str, TimeAggregation], policies: Mapping[str, str], calendar: Calendar
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the times of the run and, for each variable, the index of the value to use at each time.

    The docstring of this module describes the policies. Candidates are the times of the instantaneous variables with
    the policy ``exact``; if there are none, the times of all ``exact`` variables. The times of the run are the
    candidates at which every variable has a value to use.

    Args:
        aggregations: mapping from the name of a variable to the weighted sums that compute its values.
        policies: mapping from the name of a variable to ``exact``, ``persist`` or ``cyclic``; at least one variable
            has ``exact``.
        calendar: calendar of the times.

    Returns:
        The times, (N,) int64 minutes since 1900; and a mapping from the name of a variable to the (N,) indices of its
        values in `TimeAggregation.times`.

    Raises:
        DataError: if no time has values of all variables. Also if the times of a ``cyclic`` source cover a year or
            more, because the source must contain a single representative year.
    """
    # Exact variables determine the times of the run; each other variable must have a value at these times.
    exact = [aggregation for name, aggregation in aggregations.items() if policies[name] == "exact"]
    # Means and sums of shorter intervals have values at more times, such as every hour. The additional times are
    # ignored, because instantaneous variables are not expected to have values at these times.
    instantaneous = [aggregation for aggregation in exact if len(aggregation.terms) == 1]
    times = np.unique(np.concatenate([aggregation.times for aggregation in instantaneous or exact]))
    # Name of a variable -> index of the value that is used at each time, -1 if there is no value.
    index_of: dict[str, np.ndarray] = {}
    for name, aggregation in aggregations.items():
        variable_times = aggregation.times
        if policies[name] == "exact":
            index = np.searchsorted(variable_times, times)
            # A time after the last value has no index, so it is compared with the last value.
            is_present = variable_times[np.minimum(index, len(variable_times) - 1)] == times
            index_of[name] = np.where(is_present, index, -1)
        elif policies[name] == "persist":
            index_of[name] = _find_persisting_values(variable_times, times)
        else:
            index_of[name] = _find_cyclic_values(name, variable_times, times, calendar)
    # A time is kept if every variable has a value.
    has_all = np.all([index >= 0 for index in index_of.values()], axis=0)
    if not has_all.any():
        spans = []
        for name, aggregation in aggregations.items():
            first = calendar.format(aggregation.times[0])
            last = calendar.format(aggregation.times[-1])
            spans.append(f"{name} {first}..{last} ({len(aggregation.times)} times)")
        raise DataError(
            f"data.sources: the variables have no time in common: {'; '.join(spans)}; name files of the same period"
        )
    if not has_all.all():
        incomplete = ", ".join(name for name, index in index_of.items() if (index < 0).any())
        logger.warning(
            "%d of %d times are left out, because %s lack values", int((~has_all).sum()), len(times), incomplete
        )
    return times[has_all], {name: index[has_all] for name, index in index_of.items()}


def find_policy(name: str, source_index: SourceIndex, conf: DataConfig) -> tuple[int, str]:
    """Return the index of the first source of a variable, and the policy that all its sources have.

    The docstring of this module describes the policies (``data.sources.N.times``).

    Args:
        name: name of the variable.
        source_index: contents of the sources.
        conf: the ``data`` section of the config.

    Raises:
        DataError: if the policies of two sources of the variable differ.
    """
    numbers = [variables[0].source_number for variables in group_by_source(source_index.file_variables[name])]
    first = numbers[0]
    for number in numbers[1:]:
        if conf.sources[number].times != conf.sources[first].times:
            raise DataError(
                f"{name} is in data.sources {first} and {number}, whose times are {conf.sources[first].times} and "
                f"{conf.sources[number].times}; times must be the same in all sources of a variable; change one of them"
            )
    return first, conf.sources[first].times


def _find_persisting_values(source_times: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the index of the last value at or before each time of the run.

    Args:
        source_times: (M,) times of the values in minutes since 1900, increasing.
        times: (N,) times of the run in minutes since 1900.

    Returns:
        (N,) indices in `source_times`; -1 if there is no earlier value, or if the value is older than the longest
        interval between two values.
    """
    index = np.searchsorted(source_times, times, side="right") - 1
    longest_interval = 0
    if len(source_times) > 1:
        longest_interval = int(np.diff(source_times).max())
    # Index -1 selects the last value here, but the condition on `index` excludes it.
    age = times - source_times[index]
    return np.where((index >= 0) & (age <= longest_interval), index, -1)


def _find_cyclic_values(name: str, source_times: np.ndarray, times: np.ndarray, calendar: Calendar) -> np.ndarray:
    """Return the index of the value of the representative year that is used at each time of the run, (N,) int64.

    Args:
        name: name of the variable, for error messages.
        source_times: (M,) times of the values in minutes since 1900, all in the same year-long period.
        times: (N,) times of the run in minutes since 1900.
        calendar: calendar of `source_times` and `times`.

    Raises:
        DataError: if the values cover a year or more, so that a date could occur twice.
    """
    # Dates without the year are compared, to find the last date at or before each time.
    source_dates = np.array([_encode_date(calendar, minutes) for minutes in source_times])
    first_year = calendar.datetime(source_times[0]).year
    last_year = calendar.datetime(source_times[-1]).year
    # The length of the year depends on the calendar, so the first date is compared with the same date a year later.
    if (last_year, source_dates[-1]) >= (first_year + 1, source_dates[0]):
        raise DataError(
            f"data.sources: {name} is from a source with times: cyclic, which is for one representative year, but its "
            f"times range from {calendar.format(source_times[0])} to {calendar.format(source_times[-1])}; restrict "
            "them to less than a year, or set times: exact"
        )
    dates = np.array([_encode_date(calendar, minutes) for minutes in times])
    order = np.argsort(source_dates, kind="stable")
    rank = np.searchsorted(source_dates[order], dates, side="right") - 1
    # A date before the first date of the year has rank -1, which selects the last value of the year.
    return order[rank]


def _encode_date(calendar: Calendar, minutes: int) -> int:
    """Return month, day, hour and minute of a time as the number MMDDhhmm, which increases through the year."""
    date = calendar.datetime(minutes)
    return ((date.month * 100 + date.day) * 100 + date.hour) * 100 + date.minute
