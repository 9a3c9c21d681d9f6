"""Check of the values at some times of a period, at least one time of each file, before a run reads all times."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np

from credit.data.sources.source_reader import SourceReader
from credit.errors import DataError, UnavailableError
from credit.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

# Number of bytes of fields that are read at once. Reading more bytes at once is not faster.
_BYTES_AT_ONCE = 2**25
# Number of bytes of fields that are read in total, which takes a few seconds; and the minimum number of times.
_CHECKED_BYTES = 2**30
_MIN_CHECKED_TIMES = 8
# Minimum number of times for remote stores, from which reading one time may take a minute.
_MIN_CHECKED_REMOTE_TIMES = 2
# Smallest number of times for which a check shows a progress bar.
_TIMES_WITH_BAR = 50


@dataclass(frozen=True)
class ValueCheckResult:
    """Result of the check of the values of a period.

    Attributes:
        num_checked: number of times that were read, at least one time of each file.
        num_times: number of times in the period.
        problems: one message for each time with wrong or unreadable fields.
    """

    num_checked: int
    num_times: int
    problems: list[str]


def check_sampled_values(reader: SourceReader, first_minutes: int, last_minutes: int) -> ValueCheckResult:
    """Read at least one time of each file in a period, and collect the problems with the values.

    Further times, evenly distributed over the period, are also read. Their number is limited so that reading takes only
    a few seconds. Problems are undeclared missing values, infinite or implausible values, and unreadable fields.

    Args:
        reader: reader of the sources.
        first_minutes: first time of the period in minutes since 1900.
        last_minutes: last time of the period in minutes since 1900, inclusive.
    """
    period_indices = np.flatnonzero((reader.times >= first_minutes) & (reader.times <= last_minutes))
    # Every file is read, even if there are many files, because the units may differ between files.
    file_indices = np.intersect1d(reader.find_indices_covering_files(), period_indices)
    bytes_per_time = 4 * len(reader.channels.time_varying_stored) * math.prod(reader.grid.shape)
    min_times = _MIN_CHECKED_REMOTE_TIMES if reader.fetch_plan.urls else _MIN_CHECKED_TIMES
    max_times = max(min_times, _CHECKED_BYTES // bytes_per_time)
    remaining_indices = np.setdiff1d(period_indices, file_indices)
    other_indices = _select_evenly(remaining_indices, max_times - len(file_indices))
    time_indices = np.union1d(file_indices, other_indices)
    logger.info(
        "checking the values of %d of %d times, %d of them to read each file",
        len(time_indices),
        len(period_indices),
        len(file_indices),
    )
    problems: list[str] = []
    times_at_once = reader.count_times_at_once(_BYTES_AT_ONCE)
    # With None, the bar is shown only on a terminal.
    is_bar_hidden = len(time_indices) < _TIMES_WITH_BAR or None
    with ProgressBar(total=len(time_indices), desc="checking values", unit="time", disable=is_bar_hidden) as bar:
        for start in range(0, len(time_indices), times_at_once):
            batch_indices = time_indices[start : start + times_at_once].tolist()
            try:
                # Reading checks the values; the fields are not used.
                for _ in reader.read_each(batch_indices):
                    pass
            except UnavailableError:
                # Reading any other time would wait for the same server.
                raise
            except DataError:
                # The error does not show which of the times are bad, so each time is read again separately.
                for time_index in batch_indices:
                    problem = _find_read_problem(reader, time_index)
                    if problem is not None:
                        problems.append(problem)
            bar.update(len(batch_indices))
    return ValueCheckResult(len(time_indices), len(period_indices), problems)


def _select_evenly(time_indices: np.ndarray, max_count: int) -> np.ndarray:
    """Return `max_count` evenly distributed elements of the indices, or all indices if there are fewer."""
    if len(time_indices) <= max_count:
        return time_indices
    selected = np.linspace(0, len(time_indices) - 1, max(0, max_count)).round().astype(int)
    return time_indices[selected]


def _find_read_problem(reader: SourceReader, time_index: int) -> str | None:
    """Return the message of the error that occurs when the fields of a time are read; None if no error occurs."""
    try:
        reader.read(time_index)
    except DataError as error:
        return str(error)
    return None
