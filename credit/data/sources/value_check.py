"""A look at the values of a period before a run reads all of them: at least one time of each file."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np

from credit.data.sources.source_reader import SourceReader
from credit.errors import DataError
from credit.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

# Fields that are read at once. A time more or less does not tell beyond it.
_BYTES_AT_ONCE = 2**25
# Fields that are read in all, which takes seconds, and the least number of times.
_BYTES_LOOKED_AT, _LEAST_LOOKED_AT = 2**30, 8
_TIMES_WITH_BAR = 50


@dataclass(frozen=True)
class Look:
    """A look at the values of a period.

    Attributes:
        looked_at: number of times that were read, at least one of each file.
        times: number of times of the period.
        bad: what is wrong, of each time whose fields are bad.
    """

    looked_at: int
    times: int
    bad: list[str]


def look_at_values(reader: SourceReader, first_minutes: int, last_minutes: int) -> Look:
    """Read one time of each file in a period and as many others as take seconds, for what is wrong with the values."""
    inside = np.flatnonzero((reader.times >= first_minutes) & (reader.times <= last_minutes))
    of_files = np.intersect1d(reader.times_of_files(), inside)
    most = max(_LEAST_LOOKED_AT, _BYTES_LOOKED_AT // (4 * len(reader.channels.stored) * math.prod(reader.grid.shape)))
    # each file may have units of its own, however many there are
    rest = _spread(np.setdiff1d(inside, of_files), most - len(of_files))
    time_indices = np.union1d(of_files, rest)
    logger.info(
        "looking at the values of %d of %d times, %d of them to see each file",
        len(time_indices),
        len(inside),
        len(of_files),
    )
    bad: list[str] = []
    at_once = reader.times_at_once(_BYTES_AT_ONCE)
    bar = ProgressBar(
        total=len(time_indices),
        desc="looking at values",
        unit="time",
        disable=len(time_indices) < _TIMES_WITH_BAR or None,
    )
    with bar:
        for first in range(0, len(time_indices), at_once):
            batch_indices = time_indices[first : first + at_once].tolist()
            try:
                for _ in reader.read_each(batch_indices):
                    pass
            except DataError:
                # which of them
                bad += filter(None, (_read_problem(reader, time_index) for time_index in batch_indices))
            bar.update(len(batch_indices))
    return Look(len(time_indices), len(inside), bad)


def _spread(time_indices: np.ndarray, most: int) -> np.ndarray:
    """Return at most so many of the places, evenly over all of them."""
    if len(time_indices) <= most:
        return time_indices
    return time_indices[np.linspace(0, len(time_indices) - 1, max(0, most)).round().astype(int)]


def _read_problem(reader: SourceReader, time_index: int) -> str | None:
    """Return what is wrong with the fields of a time, None where nothing is."""
    try:
        reader.read(time_index)
    except DataError as error:
        return str(error)
    return None
