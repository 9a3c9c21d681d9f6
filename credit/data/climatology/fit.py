"""Fit of a climatology to the times of a period, either at once or block by block with bitwise identical results.

The value of each cell is computed from sums over the times in ascending order. Therefore the result does not depend on
which times of the day, parts of the year or channels are fitted together.

Letters of shapes: N times of the period, T times of the day, K parts of the year (or harmonics), C channels, H latitude
rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from credit.calendar import Calendar
from credit.config.sections.verification import ClimatologyConfig
from credit.data.climatology.climatology import Climatology, evaluate_harmonics
from credit.errors import ConfigError
from credit.utils.progress import ProgressBar

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

# With fewer years, the mean of a single day contains too much weather noise to be a good baseline.
_MIN_UNSMOOTHED_YEARS = 10.0
# Largest accepted condition number of the normal equations. Times over a year give 1, over half a year about 60, and
# over a quarter of a year 3000.
_MAX_CONDITION = 1000.0
_ALL = slice(None)
# Bytes of the float64 values that are added at once. The values of a few channels fit in the CPU cache.
_BYTES_PER_ADDITION = 2**20


@dataclass(frozen=True)
class ClimatologyPlan:
    """Plan of the fit of a climatology: all inputs of the fit except the fields.

    For each time of the day and each part of the year (or harmonic), the fit computes a weighted sum of the fields of
    all times. The fields of the climatology are then computed from these sums and `divisors`.

    Attributes:
        kind: ``harmonic`` or ``table``, see `Climatology`.
        positions: (N,) indices in the reader of the times of the period.
        fractions: (N,) fraction of the year of each time.
        day_time_index: (N,) index in `day_minutes` of the time of the day of each time; 0 if the climatology does not
            depend on the time of the day.
        day_minutes: (T,) times of the day in minutes after 0 UTC; empty if the climatology does not depend on the
            time of the day.
        centres: (T,) fraction of the year at which the first part of a ``table`` is centred; None for ``harmonic``.
        width: width of the averaging window of a ``table``, as a multiple of a part of the year; NaN for
            ``harmonic``.
        divisors: (T, K, K) inverse matrices of the normal equations (``harmonic``), or (T, K) numbers of times by
            which the sums are divided (``table``).
        description: method and period in words, for reports.
        years: length of the period in years.
    """

    kind: str
    positions: np.ndarray
    fractions: np.ndarray
    day_time_index: np.ndarray
    day_minutes: np.ndarray
    centres: tuple[float, ...] | None
    width: float
    divisors: np.ndarray
    description: str
    years: float

    @property
    def shape(self) -> tuple[int, int]:
        """(T, K): number of times of the day (at least 1), and number of harmonics or parts of the year."""
        return self.divisors.shape[0], self.divisors.shape[1]

    def evaluate_weights(self, time_indices: np.ndarray, parts: slice = _ALL) -> np.ndarray:
        """Return the weight of each of M times in the sum of each of P parts (or harmonics), (M, P) float64.

        Args:
            time_indices: (M,) indices of the times in the N times of the plan.
            parts: slice that selects P of the K harmonics or parts of the year.
        """
        count = self.shape[1]
        if self.kind == "harmonic":
            return evaluate_harmonics(self.fractions[time_indices], count)[:, parts]
        since_centre = self.fractions[time_indices] - np.array(self.centres)[self.day_time_index[time_indices]]
        return _compute_window_weights(since_centre, np.arange(count)[parts], count, self.width)


def fit_climatology(
    reader: FieldReader,
    channel_names: Sequence[str],
    first_minutes: int,
    last_minutes: int,
    conf: ClimatologyConfig | None = None,
) -> Climatology:
    """Fit a climatology in one pass over a period, in memory.

    Args:
        reader: reader of the fields.
        channel_names: (C,) names of the stored channels to fit.
        first_minutes: first time of the period in minutes since 1900.
        last_minutes: last time of the period in minutes since 1900, inclusive.
        conf: settings of the climatology. The method ``harmonic`` is a least-squares fit of the mean and of annual
            harmonics in every cell. ``window`` computes means over a window of days around each part of the year. None
            selects ``harmonic`` with one harmonic.

    Returns:
        The climatology. With ``window``, every time contributes to the means of the same number of parts of the year.
        If the window is not a whole number of parts, this number may differ by one between times. The times of a part
        are evenly spaced around its centre, for all times of the day in the data.

    Raises:
        ConfigError: if the period is too short for the method.
    """
    plan = plan_fit(reader.times, reader.calendar, first_minutes, last_minutes, conf or ClimatologyConfig())
    return Climatology(
        names=tuple(channel_names),
        calendar=reader.calendar.name,
        kind=plan.kind,
        fields=fit_fields(plan, reader, channel_names),
        day_minutes=plan.day_minutes,
        description=plan.description,
        years=plan.years,
        centres=plan.centres,
    )


def plan_fit(
    times: np.ndarray, calendar: Calendar, first_minutes: int, last_minutes: int, conf: ClimatologyConfig
) -> ClimatologyPlan:
    """Return the plan of the fit of a climatology to the times of a period.

    Args:
        times: all times of the data in minutes since 1900, ascending.
        calendar: calendar of the times.
        first_minutes: first time of the period in minutes since 1900.
        last_minutes: last time of the period in minutes since 1900, inclusive.
        conf: settings of the climatology; the method must be ``harmonic`` or ``window``.

    Raises:
        ConfigError: if the period is too short for the method. This depends only on the times, not on the fields.
    """
    positions = np.flatnonzero((times >= first_minutes) & (times <= last_minutes))
    if not len(positions):
        raise ConfigError("data.splits.train: the data have no time in this period; choose a period with data")
    times = times[positions]
    years = _count_years(times, calendar)
    fractions = calendar.year_fraction(times)
    # Each time of the day has a separate climatology, which is fitted to the times at this time of the day.
    if conf.by_hour:
        day_minutes = np.unique(times % 1440)
        day_time_index = np.searchsorted(day_minutes, times % 1440)
    else:
        day_minutes = np.empty(0, dtype=np.int64)
        day_time_index = np.zeros(len(times), dtype=np.int64)
    num_day_times = max(1, len(day_minutes))
    fractions_by_day_time = [fractions[day_time_index == number] for number in range(num_day_times)]
    # Only the parts of the year of a table have a centre and a width.
    centres = None
    width = float("nan")
    period = f"{calendar.format(times[0])[:10]} to {calendar.format(times[-1])[:10]}"
    if conf.method == "harmonic":
        kind = "harmonic"
        inverses = [_invert_normal_equations(group, conf.harmonics, period) for group in fractions_by_day_time]
        divisors = np.stack(inverses)
    else:
        assert conf.method == "window", conf.method
        kind = "table"
        _require_years(conf.window_days, years)
        days = calendar.days_per_year
        # Parts of a twelfth of the window resolve all variations that remain after the moving mean over the window.
        num_parts = round(days / max(1.0, conf.window_days / 12.0))
        width = conf.window_days * num_parts / days
        # Centre a part at the (mean) time of the day of the data. Its window then begins and ends midway between times,
        # and contains the same number of times of every year.
        centres = ()
        counts = []
        for number, fractions_of_group in enumerate(fractions_by_day_time):
            mean_minutes = (times[day_time_index == number] % 1440).mean()
            centre = float(mean_minutes / (1440 * days))
            centres += (centre,)
            counts.append(_count_times(fractions_of_group, centre, num_parts, width, days))
        divisors = np.stack(counts)
    description = f"{_describe_method(conf)}, {period}"
    return ClimatologyPlan(
        kind, positions, fractions, day_time_index, day_minutes, centres, width, divisors, description, years
    )


def fit_fields(
    plan: ClimatologyPlan,
    reader: FieldReader,
    channel_names: Sequence[str],
    times_of_day: slice = _ALL,
    parts: slice = _ALL,
    progress: bool = True,
) -> np.ndarray:
    """Fit the fields of a climatology, or a block of these fields. Each time of the period is read at most once.

    Args:
        plan: plan returned by `plan_fit` for the times of the reader.
        reader: reader of the fields.
        channel_names: (C,) names of the stored channels to fit.
        times_of_day: slice that selects times of the day.
        parts: slice that selects parts of the year. For harmonics, it must be ``slice(None)``, because all harmonics
            are fitted together.
        progress: True to show a progress bar on a terminal.

    Returns:
        (T, K, C, H, W) float32 in physical units, for T selected times of the day and K selected parts of the year.
    """
    assert plan.kind == "table" or parts == _ALL
    stored_names = [channel.name for channel in reader.channels.time_varying_stored]
    day_times = np.arange(plan.shape[0])[times_of_day]
    # Read only times with a weight in at least one sum.
    rows = np.flatnonzero(np.isin(plan.day_time_index, day_times))
    weights_NK = plan.evaluate_weights(rows, parts)
    is_needed = weights_NK.any(axis=1)
    rows = rows[is_needed]
    weights_NK = weights_NK[is_needed]
    sums_TKCHW = np.zeros((len(day_times), weights_NK.shape[1], len(channel_names), *reader.grid.shape))
    # The reader fills the fields of the fitted channels, and skips all other channels.
    values_CHW = np.empty((len(channel_names), *reader.grid.shape), dtype=np.float32)
    targets: list[np.ndarray | None] = [None] * len(stored_names)
    for name, values in zip(channel_names, values_CHW, strict=True):
        targets[stored_names.index(name)] = values
    bar = ProgressBar(rows, "climatology", disable=None if progress else True)
    for row, weights_K in zip(bar, weights_NK, strict=True):
        reader.read_into(int(plan.positions[row]), targets)
        # The selected times of the day are adjacent, so their indices in the sums begin at 0.
        day_time = plan.day_time_index[row] - day_times[0]
        _add_weighted(sums_TKCHW[day_time], weights_K, values_CHW)
    # Compute the fields from the sums: means of a table, or solutions of the normal equations of harmonics.
    divisors = plan.divisors[day_times]
    fields_TKCHW = np.empty(sums_TKCHW.shape, dtype=np.float32)
    for day_time, part in np.ndindex(*sums_TKCHW.shape[:2]):
        if plan.kind == "table":
            # `part` is an index in the selected parts.
            fields_TKCHW[day_time, part] = sums_TKCHW[day_time, part] / divisors[day_time, parts][part]
            continue
        for channel in range(len(channel_names)):
            # Add the products one by one. In a matrix product, the order of summation depends on the sizes of the
            # matrices, but blocks of any size must give the same values.
            total_HW = 0
            for factor, sum_HW in zip(divisors[day_time, part], sums_TKCHW[day_time, :, channel], strict=True):
                total_HW = total_HW + factor * sum_HW
            fields_TKCHW[day_time, part, channel] = total_HW
    return fields_TKCHW


def _describe_method(conf: ClimatologyConfig) -> str:
    """Return a description of the method of a fit, for reports."""
    if conf.method == "harmonic" and conf.harmonics == 0:
        text = "mean"
    elif conf.method == "harmonic" and conf.harmonics == 1:
        text = "1 annual harmonic"
    elif conf.method == "harmonic":
        text = f"{conf.harmonics} annual harmonics"
    elif conf.window_days > 1:
        text = f"moving mean of {conf.window_days} days"
    else:
        text = "mean of each day of the year"
    if conf.by_hour:
        text += ", by time of the day"
    return text


def _add_weighted(sums_KCHW: np.ndarray, weights_K: np.ndarray, values_CHW: np.ndarray) -> None:
    """Add the fields of one time to the weighted sums, in place.

    Args:
        sums_KCHW: float64 sums of K parts of the year (or harmonics).
        weights_K: weight of the time in each sum; sums with the weight 0 are skipped.
        values_CHW: float32 fields of the time.
    """
    channels_per_addition = max(1, _BYTES_PER_ADDITION // (8 * values_CHW[0].size))
    for start in range(0, len(values_CHW), channels_per_addition):
        channels = slice(start, start + channels_per_addition)
        values = values_CHW[channels].astype(np.float64)
        for part in np.flatnonzero(weights_K):
            sums_KCHW[part, channels] += weights_K[part] * values


def _count_years(times: np.ndarray, calendar: Calendar) -> float:
    """Return the length of a period in years, from the first time to one time step after the last.

    Every calendar year is treated as one year, regardless of its number of days.

    Args:
        times: (N,) minutes since 1900, ascending.
        calendar: calendar of the times.
    """
    step = 0
    if len(times) > 1:
        step = np.diff(times).min()
    ends = np.array([times[0], times[-1] + step])
    first_year = calendar.datetime(ends[0]).year
    last_year = calendar.datetime(ends[1]).year
    first_fraction, last_fraction = calendar.year_fraction(ends)
    return last_year - first_year + float(last_fraction - first_fraction)


def _require_years(window_days: int, years: float) -> None:
    """Raise ConfigError if a window of one day (no smoothing) is used with less than about ten years of data."""
    if window_days == 1 and years < _MIN_UNSMOOTHED_YEARS - 0.1:
        raise ConfigError(
            f"verification.climatology.window_days: 1 (unsmoothed) needs at least {_MIN_UNSMOOTHED_YEARS:g} years of "
            f"training data, there are {years:.1f}; set method: harmonic or a window of about 61 days"
        )


def _compute_window_weights(since_centre: np.ndarray, parts: np.ndarray, num_parts: int, width: float) -> np.ndarray:
    """Return (N, P) float64 weights: 1 where a time is in the window around a part of the year, else 0.

    Args:
        since_centre: (N,) time elapsed since the centre of the first part, as a fraction of the year.
        parts: (P,) indices of the parts, from 0.
        num_parts: number of parts in a year.
        width: width of the window as a multiple of a part. The window includes its beginning but not its end.
    """
    # Round the distance; otherwise a time at the edge of two windows could be in both windows or in no window.
    distance = np.round(since_centre * num_parts, 9)[:, None] - parts
    # Distance to the nearest occurrence of the part, in this year or a neighbouring year.
    distance = np.mod(distance + num_parts / 2, num_parts) - num_parts / 2
    return ((-width / 2 <= distance) & (distance < width / 2)).astype(np.float64)


def _count_times(fractions: np.ndarray, centre: float, num_parts: int, width: float, days: int) -> np.ndarray:
    """Return the number of times in the window around each part of the year, (K,) float64.

    Args:
        fractions: (N,) fractions of the year of the times.
        centre: fraction of the year at which the first part is centred.
        num_parts: K, the number of parts in a year.
        width: width of the window as a multiple of a part.
        days: number of days in a year, for the error message.

    Raises:
        ConfigError: if the window around a part contains no time.
    """
    # Process the parts one by one, because a table of all times and parts may not fit into memory.
    counts_K = np.empty(num_parts)
    for part in range(num_parts):
        counts_K[part] = _compute_window_weights(fractions - centre, np.array([part]), num_parts, width).sum()
    empty_parts = np.flatnonzero(counts_K == 0)
    if len(empty_parts):
        missing_day = int(empty_parts[0] / num_parts * days) + 1
        raise ConfigError(
            f"verification.climatology: the training period has no time around day {missing_day} of the year; "
            "set method: harmonic or a wider window"
        )
    return counts_K


def _invert_normal_equations(fractions: np.ndarray, waves: int, period: str) -> np.ndarray:
    """Return the inverse of the matrix of the normal equations, (K, K) float64, with K = 2 `waves` + 1.

    Args:
        fractions: (N,) fractions of the year of the times.
        waves: number of annual harmonics. K functions are fitted: the mean, and a cosine and a sine for each harmonic.
        period: the period as a string, for the error message.

    Raises:
        ConfigError: if there are too few times, or if the times cover too small a part of the year.
    """
    weights_NK = evaluate_harmonics(fractions, 2 * waves + 1)
    gram_KK = weights_NK.T @ weights_NK
    is_underdetermined = len(weights_NK) < weights_NK.shape[1]
    if not is_underdetermined:
        # Scale the diagonal to ones, so that the condition number depends only on the distribution of the times.
        scale_K = np.sqrt(np.diag(gram_KK))
        is_underdetermined = np.linalg.cond(gram_KK / np.outer(scale_K, scale_K)) > _MAX_CONDITION
    if is_underdetermined:
        raise ConfigError(
            f"verification.climatology.harmonics: {waves} cannot be fitted to {len(weights_NK)} times from {period}, "
            "too small a part of the year; set it to 0 (the mean) or train on a longer period"
        )
    return np.linalg.inv(gram_KK)
