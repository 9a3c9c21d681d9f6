"""Which initial times a run forecasts from."""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from credit.calendar import Calendar, format_duration, parse_duration
from credit.config.schema_data import DataConfig
from credit.config.schema_inference import EnsembleConfig, InferenceConfig, InitialTimesConfig
from credit.data.splits import Split, describe_coverage, describe_span
from credit.errors import ConfigError, DataError
from credit.forecast.ensemble.perturbations import lag_minutes
from credit.parallel.process_info import read_process_info

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class InitialTimes:
    """The initial times that a config asks for.

    Attributes:
        minutes: those that are forecast from, increasing.
        left_out: how many others of the range were asked for, and why each is left out, in words, or why the last time
            of the data is; empty where none is.
        data_lack: whether it is the data that lack something, rather than the test period that ends.
    """

    minutes: list[int]
    left_out: str = ""
    data_lack: bool = False


def choose_initial_times(
    conf: InferenceConfig, data: DataConfig, times: np.ndarray, calendar: Calendar, test: Split
) -> list[int]:
    """Return the minutes of `find_initial_times`; the first rank's log says what is left out."""
    found = find_initial_times(conf, data, times, calendar, test)
    if found.left_out and read_process_info().is_main:
        logger.log(logging.WARNING if found.data_lack else logging.INFO, "%s", found.left_out)
    return found.minutes


def find_initial_times(
    conf: InferenceConfig, data: DataConfig, times: np.ndarray, calendar: Calendar, test: Split
) -> InitialTimes:
    """Return the initial times of ``inference.initial_times``.

    A range without a given end keeps only those whose truth at every lead lies in the test period, so that all lead
    times are scored on one set of cases, and whose ensemble's earlier analyses are in the data. A time that is asked
    for by name needs only its input frames, those analyses, and forcing that the config says is observed.

    Raises:
        ConfigError: if a time is named twice or none is, or a distance is no multiple of the step.
        DataError: if the data lack what a named time needs, or no time is left.
    """
    have, step = set(times.tolist()), data.step_minutes
    frames = [before + k * step for before in lag_offsets(conf.ensemble) for k in range(data.history_len)]
    if conf.initial_times == "latest":
        ready = [minutes for minutes in have if all(minutes - before in have for before in frames)]
        if not ready:
            raise DataError(
                f"inference.initial_times: latest: no time of the data has what a forecast needs: fields of the last "
                f"{format_duration(max(frames))} at data.timestep {format_duration(step)}; "
                f"{describe_span(times, calendar)}; name more files in data.sources"
            )
        found = _latest(max(ready), max(have), frames, have, calendar)
    elif isinstance(conf.initial_times, InitialTimesConfig):
        found = _in_range(conf, conf.initial_times, data, times, calendar, test, frames)
    else:
        found = InitialTimes(_named(conf.initial_times, calendar))
    _require_frames(found.minutes, times, calendar, frames)
    earliest, longest = max(lag_offsets(conf.ensemble)), choose_leads(conf, step)[-1]
    _require_observed(found.minutes, times, calendar, data, earliest, longest)
    return found


def _latest(chosen: int, last: int, frames: Sequence[int], have: Collection[int], calendar: Calendar) -> InitialTimes:
    """Return the last time that has all it needs; it is told why it is not the last of the data."""
    if chosen == last:
        return InitialTimes([chosen])
    lacking = next(last - before for before in frames if last - before not in have)
    return InitialTimes(
        [chosen],
        f"inference.initial_times: latest: {calendar.format(chosen)}, not the last time of the data, "
        f"{calendar.format(last)}, which needs the fields of {calendar.format(lacking)}, and the data do not have them",
        data_lack=True,
    )


def _named(wanted: Sequence[str], calendar: Calendar) -> list[int]:
    """Return the times of a list, each once."""
    key = "inference.initial_times"
    if not wanted:
        raise ConfigError(f"{key}: [] has no time; name some, or leave the key out for those of the test period")
    chosen = sorted(calendar.parse(text, key) for text in wanted)
    for minutes, after in itertools.pairwise(chosen):
        if minutes == after:
            raise ConfigError(f"{key}: {calendar.format(minutes)} is named twice; name each time once")
    return chosen


def _in_range(
    conf: InferenceConfig,
    wanted: InitialTimesConfig,
    data: DataConfig,
    times: np.ndarray,
    calendar: Calendar,
    test: Split,
    frames: Sequence[int],
) -> InitialTimes:
    """Return the times of a range; without an end those that have truth and `frames`, minutes before them."""
    every = every_minutes(wanted, data.step_minutes)
    key = "inference.initial_times"
    first = test.first if wanted.start is None else calendar.parse(wanted.start, f"{key}.start")
    if wanted.end is not None:
        end = calendar.parse(wanted.end, f"{key}.end")
        chosen = list(range(first, end + 1, every))
        if not chosen:
            raise ConfigError(f"{key}: end {calendar.format(end)} is before start {calendar.format(first)}")
        return InitialTimes(chosen)
    if first > test.last:
        raise ConfigError(
            f"{key}.start: {wanted.start} is after {test.describe(calendar)}, in which a range without an end lies; "
            f"give {key}.end, or another data.splits.test"
        )
    asked = range(first, test.last + 1, every)
    why = _find_hindrance(conf, data, times, test, frames)
    hindered = {minutes: why(minutes) for minutes in asked}
    chosen = [minutes for minutes, hindrance in hindered.items() if hindrance is None]
    counted = Counter(hindrance for hindrance in hindered.values() if hindrance is not None)
    reasons = ", ".join(f"{number} {hindrance.what}" for hindrance, number in counted.items())
    if not chosen:
        raise DataError(
            f"{test.describe(calendar)}: no forecast can begin at any of the {len(asked)} times of {key} in this "
            f"period: {reasons}; {describe_span(times, calendar)}; {counted.most_common(1)[0][0].way_out}"
        )
    if not counted:
        return InitialTimes(chosen)
    cover = describe_coverage(times, test, calendar, data.step_minutes)
    left_out = f"{key}: {counted.total()} of {len(asked)} are left out: {reasons}; {test.describe(calendar)}"
    return InitialTimes(
        chosen, f"{left_out}{f': {cover}' if cover else ''}", any(hindrance.of_data for hindrance in counted)
    )


@dataclass(frozen=True)
class _Hindrance:
    """Why a forecast cannot begin at a time of a range, what helps, and whether it is the data that lack something."""

    what: str
    way_out: str
    of_data: bool = True


def _find_hindrance(
    conf: InferenceConfig, data: DataConfig, times: np.ndarray, test: Split, frames: Sequence[int]
) -> Callable[[int], _Hindrance | None]:
    """Return initial time -> the first thing that a forecast from it lacks, None where it lacks nothing."""
    step, have = data.step_minutes, set(times.tolist())
    steps = range(step, parse_duration(conf.lead_time) // step * step + 1, step)
    length = f"inference.lead_time {conf.lead_time}"
    shorter = "shorten inference.lead_time, or list the times in inference.initial_times, which then need no truth"
    more = "name more files in data.sources"
    early = _Hindrance("before the period", "give inference.initial_times.start within it", of_data=False)
    absent = _Hindrance(
        "at which the data have nothing",
        "choose times that the data have (inference.initial_times.start, or a list of them; data.splits.test), or "
        f"{more}",
    )
    ends = _Hindrance(
        f"whose {length} ends after the period", f"{shorter}, or lengthen data.splits.test", of_data=False
    )
    truth = _Hindrance(f"without truth in the data at every step of {length}", f"{shorter}, or {more}")
    past = _Hindrance(
        f"without the {data.history_len} input frames in the period",
        f"choose a longer data.splits.test, or {more}",
        of_data=False,
    )
    analyses = _Hindrance(
        f"without the analyses up to {format_duration(max(frames))} before, from which inference.ensemble starts",
        f"begin later (data.splits.test), shorten lagged or cycles of inference.ensemble, or {more}",
    )

    def why(minutes: int) -> _Hindrance | None:
        if minutes < test.first:
            return early
        if minutes not in have:
            return absent
        if minutes + len(steps) * step > test.last:
            return ends
        if any(minutes + lead not in have for lead in steps):
            return truth
        if any(minutes - k * step not in have or minutes - k * step < test.first for k in range(data.history_len)):
            return past
        return analyses if any(minutes - before not in have for before in frames) else None

    return why


def every_minutes(wanted: InitialTimesConfig, step: int) -> int:
    """Return the distance of the initial times of a range.

    Raises:
        ConfigError: if it is no multiple of the step.
    """
    every = parse_duration(wanted.every)
    if every % step:
        raise ConfigError(
            f"inference.initial_times.every: {wanted.every} is not a multiple of data.timestep {format_duration(step)}"
        )
    return every


def lag_offsets(conf: EnsembleConfig | None) -> list[int]:
    """Return how long before an initial time, in minutes, its ensemble's analyses lie."""
    if conf is None:
        return [0]
    lag = lag_minutes(conf)
    earlier = [0] if conf.perturbation is None else conf.perturbation.analysis_lags_minutes()
    offsets = set()
    for member in range(conf.members):
        offsets.update(member * lag + minutes for minutes in earlier)
    return sorted(offsets)


def group(chosen: Sequence[int], members: int, batch_size: int) -> list[list[int]]:
    """Return groups of initial times of which each fills a batch of starts, or is one time with several batches.

    Groups are what ranks and jobs share, so that batches, and with them the rounding of every forecast, do not depend
    on how many there are.
    """
    size = max(1, batch_size // members)
    return [list(chosen[first : first + size]) for first in range(0, len(chosen), size)]


def select_part(chosen: Sequence[T], part: str) -> list[T]:
    """Return the I-th of N parts, written ``I/N``; the N parts are exactly `chosen`, and none is longer by two.

    Raises:
        ConfigError: if `part` is no such thing.
    """
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f'--part: "{part}": write I/N with I from 1 to N, for example 2/8')
    return deal(chosen, int(match[1]) - 1, int(match[2]))


def deal(chosen: Sequence[T], rank: int, ranks: int) -> list[T]:
    """Return what falls to `rank`: each to exactly one of the ranks, to none two more than to another."""
    return list(chosen[rank::ranks])


def choose_leads(conf: InferenceConfig, step: int) -> list[int]:
    """Return the lead times in minutes that are written.

    They are ``inference.lead_times``, or every ``output_every`` up to ``lead_time``.

    Raises:
        ConfigError: if they are no multiples of `step`, in minutes, or none is left.
    """
    if conf.lead_times is not None:
        return [parse_duration(lead) for lead in conf.lead_times]
    every = step if conf.output_every is None else parse_duration(conf.output_every)
    if every % step:
        raise ConfigError(
            f"inference.output_every: {conf.output_every} is not a multiple of data.timestep {format_duration(step)}"
        )
    leads = list(range(every, parse_duration(conf.lead_time) + 1, every))
    if not leads:
        raise ConfigError(
            f"inference.output_every: no multiple of {format_duration(every)} is within lead_time {conf.lead_time}"
        )
    return leads


def _require_frames(chosen: Sequence[int], times: np.ndarray, calendar: Calendar, frames: Sequence[int]) -> None:
    have = set(times.tolist())
    lacking = {t: next((t - before for before in frames if t - before not in have), None) for t in chosen}
    lacking = {initial: time for initial, time in lacking.items() if time is not None}
    if lacking:
        initial, time = next(iter(lacking.items()))
        others = f"; so do {len(lacking) - 1} others of {len(chosen)} initial times" if len(lacking) > 1 else ""
        raise DataError(
            f"inference.initial_times: {calendar.format(initial)} needs the fields of {calendar.format(time)}, which "
            f"the data do not have{others}; {describe_span(times, calendar)}; name other times, or more "
            "files in data.sources"
        )


def _require_observed(
    chosen: Sequence[int], times: np.ndarray, calendar: Calendar, data: DataConfig, earliest: int, longest: int
) -> None:
    """A forecast with observed forcing needs data up to its last step, or a step more where its window is the next.

    An ensemble needs them from the first of its analyses on, `earliest` minutes before.
    """
    have = set(times.tolist())
    for channel in data.channel_map().group("dynamic_forcing"):
        field = data.field(channel.variable)
        if channel.source != "data" or field.in_forecast != "observed":
            continue
        shift = data.step_minutes if field.temporal != "instant" and field.window == "next" else 0
        for initial, lead in itertools.product(chosen, range(shift - earliest, longest + shift, data.step_minutes)):
            if initial + lead not in have:
                raise DataError(
                    f"inference.initial_times: the forecast from {calendar.format(initial)} needs {channel.variable} "
                    f"(in_forecast: observed) at {calendar.format(initial + lead)}, which the data do not have; "
                    f"{describe_span(times, calendar)}; shorten inference.lead_time, name other times, or set "
                    f"data.variable_options.{channel.variable}.in_forecast: persist"
                )
