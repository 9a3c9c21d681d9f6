"""Fits a climatology to the times of a period, whole or block by block with the same numbers to the last bit.

Every number is a sum over times in their order, then a division or a combination of such sums, cell by cell; so it does
not matter which times of the day, parts of the year or channels are done together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from credit.calendar import Calendar
from credit.config.schema_forecast import ClimatologyConfig
from credit.data.climatology.climatology import Climatology, evaluate_harmonics
from credit.errors import ConfigError
from credit.utils.progress import ProgressBar

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

_UNSMOOTHED_YEARS = 10.0  # fewer leave so much weather in a day's mean that it is too weak a baseline
# the largest ratio of the normal equations' eigenvalues; a whole year has 1, half a year about 60, a quarter 3000
_WORST_CONDITION = 1000.0
_EVERY = slice(None)
# values are added in stretches of channels that stay in the processor's cache
_STRETCH_BYTES = 2**20


@dataclass(frozen=True)
class ClimatologyPlan:
    """What a fit needs besides the fields: which times count in which sums, and what becomes of the sums.

    Attributes:
        kind: ``harmonic`` or ``table``, as of the `Climatology`.
        positions: (N,) places of the period's times in the reader.
        fractions: (N,) of the year.
        members: (N,) which time of the day each is; 0 where they are not told apart.
        day_minutes: (T,) minutes of the UTC day, empty where they are not told apart.
        centres: (T,) fraction of the year at which the first part is centred; None unless it is a table.
        width: of the window, in parts (``table``).
        divisors: (T, K, K) inverse normal equations (``harmonic``) or (T, K) number of times (``table``).
        description: method and period in words.
        years: length of the period.
    """

    kind: str
    positions: np.ndarray
    fractions: np.ndarray
    members: np.ndarray
    day_minutes: np.ndarray
    centres: tuple[float, ...] | None
    width: float
    divisors: np.ndarray
    description: str
    years: float

    @property
    def shape(self) -> tuple[int, int]:
        """Return T and K: times of the day, and harmonics or parts of the year."""
        return self.divisors.shape[0], self.divisors.shape[1]

    def weights(self, rows: np.ndarray, parts: slice = _EVERY) -> np.ndarray:
        """Return how much some of the times count in some of the sums, (N, P) float64."""
        count = self.shape[1]
        if self.kind == "harmonic":
            return evaluate_harmonics(self.fractions[rows], count)[:, parts]
        since = self.fractions[rows] - np.array(self.centres)[self.members[rows]]
        return _in_window(since, np.arange(count)[parts], count, self.width)


def fit_climatology(
    reader: FieldReader,
    channel_names: Sequence[str],
    first_minutes: int,
    last_minutes: int,
    conf: ClimatologyConfig | None = None,
) -> Climatology:
    """Fit a climatology in one pass over a period, in memory.

    Args:
        reader: the data.
        channel_names: stored channels to fit.
        first_minutes: first time of the period.
        last_minutes: last time of the period.
        conf: ``harmonic``, least squares of the mean and some waves of the year in every cell; or ``window``, means
            over some days around each part of the year; by default one harmonic.

    Returns:
        The climatology. With ``window`` each time counts in as many parts as any other, to one where the window is no
        whole number of them, and the times of a part lie evenly around its centre, whatever hours the data have.

    Raises:
        ConfigError: if the period cannot carry the method.
    """
    fit = plan_fit(reader.times, reader.clock, first_minutes, last_minutes, conf or ClimatologyConfig())
    fields = fit_fields(fit, reader, channel_names)
    return Climatology(
        tuple(channel_names), reader.clock.calendar, fit.kind, fields, fit.day_minutes, fit.description, fit.years,
        fit.centres,
    )  # fmt: skip


def plan_fit(
    times: np.ndarray, clock: Calendar, first_minutes: int, last_minutes: int, conf: ClimatologyConfig
) -> ClimatologyPlan:
    """Return how a climatology is fitted to the times of a period.

    Raises:
        ConfigError: if the period cannot carry the method, which depends on the times alone.
    """
    positions = np.flatnonzero((times >= first_minutes) & (times <= last_minutes))
    if not len(positions):
        raise ConfigError("data.splits.train: the data have no time in it, so there is no climatology")
    times = times[positions]
    years = _years(times, clock)
    fractions = clock.year_fraction(times)
    day_minutes = np.unique(times % 1440) if conf.by_hour else np.empty(0, dtype=np.int64)
    members = np.searchsorted(day_minutes, times % 1440) if conf.by_hour else np.zeros(len(times), dtype=np.int64)
    groups = [fractions[members == member] for member in range(max(1, len(day_minutes)))]
    centres, width = None, float("nan")
    period = f"{clock.format(times[0])[:10]} to {clock.format(times[-1])[:10]}"
    if conf.method == "harmonic":
        kind = "harmonic"
        divisors = np.stack([_invert(group, conf.harmonics, period) for group in groups])
    else:
        assert conf.method == "window", conf.method
        kind = "table"
        _require_years(conf.window_days, years)
        days = clock.days_a_year
        # parts a twelfth of the window long lose nothing that the window has left
        count = round(days / max(1.0, conf.window_days / 12.0))
        width = conf.window_days * count / days
        hours = [(times[members == member] % 1440).mean() for member in range(len(groups))]
        # a window that begins and ends midway between times has as many of each year
        centres = tuple(float(minutes / (1440 * days)) for minutes in hours)
        divisors = np.stack([_count(*group, count, width, days) for group in zip(groups, centres, strict=True)])
    description = f"{_describe(conf)}, {period}"
    return ClimatologyPlan(
        kind, positions, fractions, members, day_minutes, centres, width, divisors, description, years
    )


def fit_fields(
    fit: ClimatologyPlan,
    reader: FieldReader,
    channel_names: Sequence[str],
    times_of_day: slice = _EVERY,
    parts: slice = _EVERY,
    progress: bool = True,
) -> np.ndarray:
    """Return a climatology's fields, or some of them; each time that they need is read once.

    Args:
        fit: from `plan_fit` with the reader's times.
        reader: the data.
        channel_names: stored channels, C of them.
        times_of_day: which times of the day, T of them.
        parts: which parts of the year, K of them; harmonics cannot be parted.
        progress: show a bar on a terminal.

    Returns:
        (T, K, C, H, W) float32.
    """
    assert fit.kind == "table" or parts == _EVERY
    stored = [channel.name for channel in reader.channels.stored]
    index = [stored.index(name) for name in channel_names]
    members = np.arange(fit.shape[0])[times_of_day]
    rows = np.flatnonzero(np.isin(fit.members, members))
    weights = fit.weights(rows, parts)
    needed = weights.any(axis=1)
    rows, weights = rows[needed], weights[needed]
    sums = np.zeros((len(members), weights.shape[1], len(index), *reader.grid.shape))
    values = np.empty((len(index), *reader.grid.shape), dtype=np.float32)
    places: list[np.ndarray | None] = [None] * len(stored)
    for channel, place in zip(index, values, strict=True):
        places[channel] = place
    for row, weight in zip(ProgressBar(rows, "climatology", disable=None if progress else True), weights, strict=True):
        reader.read_into(int(fit.positions[row]), places)
        _add(sums[fit.members[row] - members[0]], weight, values)
    divisors, fields = fit.divisors[members], np.empty(sums.shape, dtype=np.float32)
    for member, part in np.ndindex(*sums.shape[:2]):
        if fit.kind == "table":
            fields[member, part] = sums[member, part] / divisors[member, parts][part]
            continue
        for channel in range(len(index)):
            # one after the other, as a product of matrices sums up in an order that depends on their sizes
            factors = zip(divisors[member, part], sums[member, :, channel], strict=True)
            fields[member, part, channel] = sum(factor * one for factor, one in factors)
    return fields


def _describe(conf: ClimatologyConfig) -> str:
    if conf.method == "harmonic":
        text = f"{conf.harmonics} annual harmonic{'s' if conf.harmonics > 1 else ''}" if conf.harmonics else "mean"
    else:
        days = conf.window_days
        text = f"moving mean of {days} days" if days > 1 else "mean of each day of the year"
    return f"{text}, by time of the day" if conf.by_hour else text


def _add(sums_KCHW: np.ndarray, weight_K: np.ndarray, values_CHW: np.ndarray) -> None:
    """Add a time's fields to the sums that they count in."""
    length = max(1, _STRETCH_BYTES // (8 * values_CHW[0].size))
    for first in range(0, len(values_CHW), length):
        stretch = slice(first, first + length)
        values = values_CHW[stretch].astype(np.float64)
        for part in np.flatnonzero(weight_K):
            sums_KCHW[part, stretch] += weight_K[part] * values


def _years(times: np.ndarray, clock: Calendar) -> float:
    """Return the years from the first time to a step after the last; those of the calendar count one each."""
    ends = np.array([times[0], times[-1] + (np.diff(times).min() if len(times) > 1 else 0)])
    first, last = (clock.datetime(minutes).year for minutes in ends)
    return last - first + float(np.diff(clock.year_fraction(ends))[0])


def _require_years(window_days: int, years: float) -> None:
    if window_days == 1 and years < _UNSMOOTHED_YEARS - 0.1:
        raise ConfigError(
            f"verification.climatology.window_days: 1 (unsmoothed) needs at least {_UNSMOOTHED_YEARS:g} years of "
            f"training data, there are {years:.1f}; take method: harmonic or a window of about 61 days"
        )


def _in_window(since: np.ndarray, parts: np.ndarray, count: int, width: float) -> np.ndarray:
    """Return which times some of the year's parts average, (N, P) of 0 and 1.

    Args:
        since: (N,) fraction of the year since the centre of the first part.
        parts: (P,) their numbers.
        count: parts a year.
        width: of the window, in parts; a time at its end belongs to the next one's beginning.
    """
    # rounded, as a time on the edge would else be in both or in none
    distance = np.round(since * count, 9)[:, None] - parts
    distance = np.mod(distance + count / 2, count) - count / 2
    return ((-width / 2 <= distance) & (distance < width / 2)).astype(np.float64)


def _count(fractions: np.ndarray, centre: float, count: int, width: float, days: int) -> np.ndarray:
    """Return how many times each part of the year averages, (K,)."""
    # one after the other, as all together may be more than there is room for
    counts = np.array([_in_window(fractions - centre, np.array([part]), count, width).sum() for part in range(count)])
    if (counts == 0).any():
        missing = int(np.flatnonzero(counts == 0)[0] / count * days) + 1
        raise ConfigError(
            f"verification.climatology: the training period has no time around day {missing} of the year; "
            "take method: harmonic or a wider window"
        )
    return counts


def _invert(fractions: np.ndarray, waves: int, period: str) -> np.ndarray:
    """Return the inverse of the normal equations, (K, K)."""
    weights = evaluate_harmonics(fractions, 2 * waves + 1)
    gram = weights.T @ weights
    scale = np.sqrt(np.diag(gram))
    if len(weights) < weights.shape[1] or np.linalg.cond(gram / np.outer(scale, scale)) > _WORST_CONDITION:
        raise ConfigError(
            f"verification.climatology.harmonics: {waves} cannot be fitted to {len(weights)} times from {period}, too "
            "small a part of the year; set it to 0 (the mean) or train on a longer period"
        )
    return np.linalg.inv(gram)
