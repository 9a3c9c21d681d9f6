"""Training, validation and test periods (splits), and the initial times of the samples in each split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar, format_duration, parse_duration
from credit.config.sections.data import DataConfig
from credit.errors import ConfigError, DataError

SPLITS = ("train", "valid", "test")
_DAY_MINUTES = 1440
# If the intervals between times differ, and all are in this range, the times are calendar months.
_SHORTEST_MONTH_MINUTES = 28 * _DAY_MINUTES
_LONGEST_MONTH_MINUTES = 31 * _DAY_MINUTES


@dataclass(frozen=True)
class Split:
    """Training, validation or test period; both ends are inclusive.

    Attributes:
        name: ``train``, ``valid`` or ``test``.
        first: first time in minutes since 1900, in the calendar of the data.
        last: last time in minutes since 1900, in the calendar of the data.
    """

    name: str
    first: int
    last: int

    def describe(self, calendar: Calendar) -> str:
        """Return config key, first and last time, for messages: ``data.splits.test 2020-01-01T00:00..``."""
        return f"data.splits.{self.name} {calendar.format(self.first)}..{calendar.format(self.last)}"


def build_splits(conf: DataConfig, calendar: Calendar) -> dict[str, Split]:
    """Return the three splits of the config, as a mapping from name to split.

    Args:
        conf: the ``data`` section of the config.
        calendar: calendar of the data.

    Raises:
        ConfigError: if a split does not end after its first time, or if the gap between two splits is shorter than
            ``data.split_gap``.
    """
    splits = {}
    for name in SPLITS:
        first, last = getattr(conf.splits, name)
        key = f"data.splits.{name}"
        split = Split(name, calendar.parse(first, key), calendar.parse_period_end(last, key))
        if split.last < split.first:
            raise ConfigError(f"{key}: {last} is before {first}; write [first, last]")
        if split.last == split.first:
            raise ConfigError(
                f"{key}: the period begins and ends at {first}, but a sample needs at least two times; write "
                "[first, last]; a last date without a time of day means the complete day"
            )
        splits[name] = split
    # Fields that are close in time are similar, so adjacent splits need a gap between them.
    gap = parse_duration(conf.split_gap, "data.split_gap")
    ordered = sorted(splits.values(), key=lambda split: split.first)
    for earlier, later in zip(ordered, ordered[1:], strict=False):
        if later.first <= earlier.last:
            raise ConfigError(
                f"{later.describe(calendar)} overlaps {earlier.describe(calendar)}; adjacent splits must be at least "
                f"data.split_gap ({conf.split_gap}) apart to avoid leakage"
            )
        # If a split ends with a complete day, its last time is 23:59, so the gap may be one minute shorter.
        if later.first - earlier.last < gap - 1:
            days = (later.first - earlier.last) / _DAY_MINUTES
            raise ConfigError(
                f"{later.describe(calendar)} begins {days:.2f} days after the end of {earlier.describe(calendar)}; "
                f"adjacent splits must be at least data.split_gap ({conf.split_gap}) apart to avoid leakage"
            )
    return splits


def require_no_leakage(
    test: Split, training_periods: Iterable[tuple[str, str]], forecast: str, calendar: Calendar
) -> None:
    """Raise ConfigError if weights would be scored in a period on which they were trained or selected.

    Args:
        test: the period that is scored.
        training_periods: (first, last) dates of the periods on which the weights were trained or selected.
        forecast: name of the forecast or the weights, for the error message.
        calendar: calendar of `test`.

    Raises:
        ConfigError: if `test` overlaps one of the training periods; the message names both periods.
    """
    period = find_overlap(test, training_periods, calendar)
    if period is not None:
        raise ConfigError(
            f"{test.describe(calendar)}: {forecast} has seen a part of this period: its weights were trained or "
            f"selected on {' to '.join(period)}; choose a period that no forecast was trained or selected on, "
            "data.splits.test=[FIRST,LAST], or set verification.allow_seen: true; the report then states the overlap"
        )


def find_overlap(
    test: Split, training_periods: Iterable[tuple[str, str]], calendar: Calendar
) -> tuple[str, str] | None:
    """Return the first training period that overlaps the period `test`; None if no training period overlaps it.

    Dates are compared as strings, because the weights may have been trained on data in a different calendar, whose
    dates may not exist in `calendar`.

    Args:
        test: the period that is scored.
        training_periods: (first, last) dates of the training periods.
        calendar: calendar of `test`.
    """
    test_first = calendar.format(test.first)
    test_last = calendar.format(test.last)
    for first, last in training_periods:
        # A last date without a time means the complete day. T24 sorts after all times of the day.
        end_of_last = last if "T" in last else f"{last}T24"
        if first <= test_last and test_first <= end_of_last:
            return first, last
    return None


def find_initial_times(times: np.ndarray, split: Split, step: int, history_len: int, forecast_len: int) -> np.ndarray:
    """Return the initial times of the complete samples of a split.

    A sample is complete if all its frames (input frames and targets) are in `split` and in `times`. A complete sample
    does not cross a gap in the data.

    Args:
        times: (N,) int64 times of the data, in minutes since 1900, increasing.
        split: the period.
        step: time step in minutes.
        history_len: number of input frames; the last input frame is at the initial time.
        forecast_len: number of forecast steps.

    Returns:
        (M,) int64 minutes since 1900, increasing; M may be 0.
    """
    inside = times[(times >= split.first) & (times <= split.last)]
    # Offsets of the frames of a sample from its initial time, in minutes.
    offsets = np.arange(-(history_len - 1), forecast_len + 1) * step
    is_complete = np.ones(len(inside), dtype=bool)
    for offset in offsets:
        is_complete &= np.isin(inside + offset, inside, assume_unique=True)
    return inside[is_complete]


def require_samples(
    times: np.ndarray, split: Split, calendar: Calendar, conf: DataConfig, forecast_len: int
) -> np.ndarray:
    """Return the initial times of the samples of a split; raise DataError if there is no sample.

    In the training and validation periods, only the samples that ``data.sample_every`` and ``data.init_hours`` select
    are returned. In the test period, all complete samples are returned, whatever ``inference.initial_times`` is.

    Args:
        times: (N,) int64 times of the data, in minutes since 1900, increasing.
        split: the period.
        calendar: calendar of the times.
        conf: the ``data`` section of the config.
        forecast_len: number of forecast steps of a sample.

    Returns:
        (M,) int64 minutes since 1900, increasing; M is at least 1.

    Raises:
        DataError: if there is no sample. The message states the times of the data in the split, their gaps, and the
            times that a sample needs.
    """
    step = conf.step_minutes
    history_len = conf.history_len
    complete_samples = find_initial_times(times, split, step, history_len, forecast_len)
    selected = complete_samples
    if split.name != "test":
        selected = _select_initial_times(complete_samples, split, conf)
    if len(selected):
        return selected
    # Case 1: there are complete samples, but no sample is selected.
    if len(complete_samples):
        hours = sorted({int(minutes % _DAY_MINUTES) // 60 for minutes in complete_samples})
        raise DataError(
            f"{split.describe(calendar)}: data.sample_every {conf.sample_every or 'any'} and data.init_hours "
            f"{conf.init_hours or 'any'} select none of {len(complete_samples)} samples, which begin at "
            f"{', '.join(map(str, hours))} UTC"
        )
    # Case 2: no sample is complete, because the period has no data, or because the data have gaps.
    inside = times[(times >= split.first) & (times <= split.last)]
    if len(inside) == 0:
        raise DataError(
            f"{split.describe(calendar)}: no data in this period; {describe_span(times, calendar)}; choose a period "
            "that the data cover, or name more files in data.sources"
        )
    raise DataError(
        f"{split.describe(calendar)}: {len(inside)} times but no complete sample: history_len {history_len} and "
        f"{forecast_len} steps of {format_duration(step)} need {history_len + forecast_len} consecutive times without "
        f"a gap; {describe_missing_times(inside, calendar, step)}; {_suggest_remedy(inside, step)}"
    )


def _suggest_remedy(times: np.ndarray, step: int) -> str:
    """Return advice for a period without any sample; usually the advice is to change ``data.timestep``.

    Args:
        times: (N,) int64 times of the data in the period, in minutes since 1900.
        step: time step in minutes.
    """
    intervals = np.diff(times)
    if len(intervals) == 0:
        return "name more files in data.sources, or a longer period"
    shortest = intervals.min()
    longest = intervals.max()
    if _SHORTEST_MONTH_MINUTES <= shortest < longest <= _LONGEST_MONTH_MINUTES:
        return (
            "months have different lengths, but all steps have the same length: give the data the calendar 360_day, in "
            "which a month is a step of 30d"
        )
    usual_interval = int(np.median(intervals))
    # Steps that are not a multiple of the usual interval miss most of the times.
    if step % usual_interval:
        interval = format_duration(usual_interval)
        return f"the usual interval between times is {interval}: set data.timestep to {interval}, or name more files"
    return "name more files in data.sources, or a longer period"


def _select_initial_times(initial: np.ndarray, split: Split, conf: DataConfig) -> np.ndarray:
    """Return the times in `initial` (N,) that ``data.sample_every`` and ``data.init_hours`` select."""
    is_selected = np.ones(len(initial), dtype=bool)
    # The interval `sample_every` is measured from the beginning of the split.
    if conf.sample_every is not None:
        is_selected &= (initial - split.first) % parse_duration(conf.sample_every) == 0
    if conf.init_hours is not None:
        is_selected &= np.isin(initial % _DAY_MINUTES, [hour * 60 for hour in conf.init_hours])
    return initial[is_selected]


def describe_span(times: np.ndarray, calendar: Calendar) -> str:
    """Return a phrase with the first and the last time of the data.

    Args:
        times: (N,) int64 times of the data, in minutes since 1900, increasing; may be empty.
        calendar: calendar of the times.
    """
    if len(times) == 0:
        return "there are no data"
    if len(times) == 1:
        return f"the data have only {calendar.format(times[0])}"
    return f"the data have {calendar.format(times[0])}..{calendar.format(times[-1])}"


def describe_coverage(times: np.ndarray, split: Split, calendar: Calendar, step: int) -> str:
    """Return a phrase that states which part of a split the data cover.

    The phrase is empty if no time step is missing at the beginning and at the end of the split.

    Args:
        times: (N,) int64 times of the data, in minutes since 1900, increasing.
        split: the period.
        calendar: calendar of the times.
        step: the time step in minutes.
    """
    inside = times[(times >= split.first) & (times <= split.last)]
    if len(inside) == 0:
        return f"the data cover no part of this period; {describe_span(times, calendar)}"
    is_begin_covered = inside[0] - split.first < step
    is_end_covered = split.last - inside[-1] < step
    if is_begin_covered and is_end_covered:
        return ""
    return f"the data cover {calendar.format(inside[0])} to {calendar.format(inside[-1])} of this period"


def describe_missing_times(times: np.ndarray, calendar: Calendar, step: int, max_shown: int = 3) -> str:
    """Return a phrase with the number of missing times, and the first and last missing time of the first few gaps.

    Args:
        times: (N,) int64 minutes since 1900, increasing.
        calendar: calendar of the times.
        step: the time step in minutes; a longer interval is a gap.
        max_shown: largest number of gaps whose dates are shown.
    """
    # `-(-a // b)` is a / b, rounded up.
    num_missing_in_gap = -(-np.diff(times) // step) - 1
    gap_index = np.flatnonzero(num_missing_in_gap)
    if len(gap_index) == 0:
        return "there is no gap"
    shown_gaps = []
    for index in gap_index[:max_shown]:
        first_missing = times[index] + step
        last_missing = times[index] + step * num_missing_in_gap[index]
        gap = calendar.format(first_missing)
        if last_missing > first_missing:
            gap += f" to {calendar.format(last_missing)}"
        shown_gaps.append(gap)
    if len(gap_index) > max_shown:
        shown_gaps.append("...")
    num_missing = int(num_missing_in_gap.sum())
    if num_missing == 1:
        return f"1 time is missing: {shown_gaps[0]}"
    return f"{num_missing} times are missing: {'; '.join(shown_gaps)}"
