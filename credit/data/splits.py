"""Training, validation and test periods, and the initial times whose whole sample lies inside one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar, format_duration, parse_duration
from credit.config.schema_data import DataConfig
from credit.errors import ConfigError, DataError

SPLITS = ("train", "valid", "test")
_DAY = 1440
_MONTH = (28 * _DAY, 31 * _DAY)


@dataclass(frozen=True)
class Split:
    """A period; both ends belong to it.

    Attributes:
        name: one of `SPLITS`.
        first: minutes of the first time.
        last: minutes of the last time.
    """

    name: str
    first: int
    last: int

    def describe(self, calendar: Calendar) -> str:
        """Return the split's name and period for messages."""
        return f"data.splits.{self.name} {calendar.format(self.first)}..{calendar.format(self.last)}"


def build_splits(conf: DataConfig, calendar: Calendar) -> dict[str, Split]:
    """Return the three splits of the config.

    Raises:
        ConfigError: if one does not end after it begins, or two are nearer to each other than ``data.split_gap``.
    """
    splits = {}
    for name in SPLITS:
        first, last = getattr(conf.splits, name)
        key = f"data.splits.{name}"
        split = Split(name, calendar.parse(first, key), calendar.parse_end(last, key))
        if split.last < split.first:
            raise ConfigError(f"{key}: {last} is before {first}; write [first, last]")
        if split.last == split.first:
            raise ConfigError(
                f"{key}: the period begins and ends at {first}, but a sample needs at least two times; write "
                "[first, last], where a last without a time of day means the whole day"
            )
        splits[name] = split
    gap = parse_duration(conf.split_gap, "data.split_gap")
    ordered = sorted(splits.values(), key=lambda split: split.first)
    for earlier, later in zip(ordered, ordered[1:], strict=False):
        if later.first <= earlier.last:
            raise ConfigError(
                f"{later.describe(calendar)} overlaps {earlier.describe(calendar)}; splits must be data.split_gap "
                f"{conf.split_gap} apart, so that one does not foretell the other"
            )
        # the last minute of a whole day counts as its end
        if later.first - earlier.last < gap - 1:
            days = (later.first - earlier.last) / 1440
            raise ConfigError(
                f"{later.describe(calendar)} begins {days:.2f} days after the end of {earlier.describe(calendar)}; "
                f"adjacent splits must be data.split_gap {conf.split_gap} apart, so that one does not foretell the "
                "other"
            )
    return splits


def require_no_leakage(test: Split, seen: Iterable[tuple[str, str]], whose: str, calendar: Calendar) -> None:
    """Refuse to score weights in a period that they were trained or selected on.

    Args:
        test: the period that is scored.
        seen: (first, last) of theirs.
        whose: what the error calls them.
        calendar: of the calendar.

    Raises:
        ConfigError: naming both periods.
    """
    period = find_overlap(test, seen, calendar)
    if period is not None:
        raise ConfigError(
            f"{test.describe(calendar)}: {whose} has seen a part of this period: its weights were trained or selected "
            f"on {' to '.join(period)}; score where no forecast has learnt or was chosen, "
            "data.splits.test=[FIRST,LAST], or set verification.allow_seen: true, which the report then says"
        )


def find_overlap(test: Split, seen: Iterable[tuple[str, str]], calendar: Calendar) -> tuple[str, str] | None:
    """Return the first of the periods `seen` that has a part of `test`, None where none has.

    They are compared as texts: weights that began with those of another calendar may have seen days that this has not.
    """
    begin, end = calendar.format(test.first), calendar.format(test.last)
    for first, last in seen:
        if first <= end and begin <= (last if "T" in last else f"{last}T24"):
            return first, last
    return None


def initial_times(times: np.ndarray, split: Split, step: int, history_len: int, forecast_len: int) -> np.ndarray:
    """Return the initial times whose whole sample (history and every target) is in `split` and in `times`.

    Args:
        times: (N,) int64 minutes that the data have, increasing.
        split: the period.
        step: the time step in minutes.
        history_len: input frames, the last of which is the initial time.
        forecast_len: forecast steps.

    Returns:
        (M,) int64 minutes; a gap in the data is never crossed.
    """
    inside = times[(times >= split.first) & (times <= split.last)]
    offsets = np.arange(-(history_len - 1), forecast_len + 1) * step
    complete = np.ones(len(inside), dtype=bool)
    for offset in offsets:
        complete &= np.isin(inside + offset, inside, assume_unique=True)
    return inside[complete]


def require_samples(
    times: np.ndarray, split: Split, calendar: Calendar, conf: DataConfig, forecast_len: int
) -> np.ndarray:
    """Return the initial times of a split's samples: those of `initial_times` at which samples are to begin.

    ``data.sample_every`` and ``data.init_hours`` choose among those for training and validation; a test period has
    ``inference.initial_times``.

    Raises:
        DataError: if there is none; naming the split, what the data have in it, the gaps, and what one sample needs.
    """
    step, history_len = conf.step_minutes, conf.history_len
    whole = initial_times(times, split, step, history_len, forecast_len)
    found = whole if split.name == "test" else _chosen(whole, split, conf)
    if len(found):
        return found
    if len(whole):
        hours = sorted({int(minutes % _DAY) // 60 for minutes in whole})
        raise DataError(
            f"{split.describe(calendar)}: none of {len(whole)} samples begins as data.sample_every "
            f"{conf.sample_every or 'any'} and data.init_hours {conf.init_hours or 'any'} say; they begin at "
            f"{', '.join(map(str, hours))} UTC"
        )
    inside = times[(times >= split.first) & (times <= split.last)]
    if len(inside) == 0:
        raise DataError(
            f"{split.describe(calendar)}: no data in this period; {describe_span(times, calendar)}; choose a period "
            "within the data, or name more files in data.sources"
        )
    raise DataError(
        f"{split.describe(calendar)}: {len(inside)} times but not one whole sample: history_len {history_len} and "
        f"{forecast_len} steps of {format_duration(step)} need {history_len + forecast_len} times in a row without a "
        f"gap; {describe_gaps(inside, calendar, step)}; {_way_out(inside, step)}"
    )


def _way_out(times: np.ndarray, step: int) -> str:
    """Return what helps where `times` hold no sample: mostly another time step."""
    apart = np.diff(times)
    if len(apart) and _MONTH[0] <= apart.min() < apart.max() <= _MONTH[1]:
        return "months are not of one length as steps are: give the data the calendar 360_day, one step of 30d a month"
    usual = int(np.median(apart)) if len(apart) else step
    if step % usual:
        return f"most of them are {format_duration(usual)} apart: set data.timestep to that, or name more files"
    return "name more files in data.sources, or a longer period"


def _chosen(initial: np.ndarray, split: Split, conf: DataConfig) -> np.ndarray:
    """Return the initial times at which samples are to begin."""
    kept = np.ones(len(initial), dtype=bool)
    if conf.sample_every is not None:
        kept &= (initial - split.first) % parse_duration(conf.sample_every) == 0
    if conf.init_hours is not None:
        kept &= np.isin(initial % _DAY, [hour * 60 for hour in conf.init_hours])
    return initial[kept]


def describe_span(times: np.ndarray, calendar: Calendar) -> str:
    """Return the first and the last of the data's `times` in words."""
    if len(times) == 0:
        return "there are no data"
    span = dict.fromkeys(calendar.format(minutes) for minutes in times[[0, -1]])
    return f"the data have {'..'.join(span)}{' alone' if len(times) == 1 else ''}"


def describe_coverage(times: np.ndarray, split: Split, calendar: Calendar, step: int) -> str:
    """Return what of a period the data's `times` cover, in words; nothing where no step is missing at its ends."""
    inside = times[(times >= split.first) & (times <= split.last)]
    if len(inside) == 0:
        return f"the data cover nothing of it; {describe_span(times, calendar)}"
    if inside[0] - split.first < step and split.last - inside[-1] < step:
        return ""
    return f"the data cover {calendar.format(inside[0])} to {calendar.format(inside[-1])} of it"


def describe_gaps(times: np.ndarray, calendar: Calendar, step: int, most: int = 3) -> str:
    """Return the gaps in `times` in words, the first few by date."""
    where = np.flatnonzero(np.diff(times) > step)
    if len(where) == 0:
        return "there is no gap"
    shown = [f"{calendar.format(times[i])} to {calendar.format(times[i + 1])}" for i in where[:most]]
    return f"{len(where)} gaps: {'; '.join(shown)}{'; ...' if len(where) > most else ''}"
