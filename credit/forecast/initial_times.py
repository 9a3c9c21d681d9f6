"""Selection of the initial times and lead times of a forecast run.

In all functions, a time is a number of minutes in the run's `Calendar`, and an offset is a number of minutes before an
initial time.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar, format_duration, parse_duration
from credit.config.sections.data import DataConfig
from credit.config.sections.inference import InferenceConfig, InitialTimesConfig
from credit.data.splits import Split, describe_coverage, describe_span
from credit.errors import ConfigError, DataError
from credit.forecast.ensemble.perturbations import analysis_offsets_minutes
from credit.parallel.process_info import read_process_info

logger = logging.getLogger(__name__)

_KEY = "inference.initial_times"


@dataclass(frozen=True)
class InitialTimes:
    """Initial times that a config selects.

    Attributes:
        minutes: initial times in minutes, ascending.
        left_out: message for the log; empty if there is nothing to report. It gives the number of skipped times of a
            range and the reasons, or for ``initial_times: latest`` why the last time of the data is not used.
        data_lack: True if missing data are among the reasons in `left_out`, not only the limits of the test period.
    """

    minutes: list[int]
    left_out: str = ""
    data_lack: bool = False


def choose_initial_times(
    conf: InferenceConfig, data: DataConfig, times: np.ndarray, calendar: Calendar, test: Split
) -> list[int]:
    """Return the initial times of ``inference.initial_times`` in minutes; rank 0 logs why times are skipped.

    See `find_initial_times` for arguments and errors.
    """
    selection = find_initial_times(conf, data, times, calendar, test)
    if selection.left_out and read_process_info().is_main:
        level = logging.WARNING if selection.data_lack else logging.INFO
        logger.log(level, "%s", selection.left_out)
    return selection.minutes


def find_initial_times(
    conf: InferenceConfig, data: DataConfig, times: np.ndarray, calendar: Calendar, test: Split
) -> InitialTimes:
    """Find the initial times of ``inference.initial_times``, with the reasons for skipped times.

    Every initial time needs its input frames, earlier analyses if an ensemble starts from them, and observed forcing if
    the config uses it. A range without an end keeps only times with truth in the test period at every step up to the
    longest lead time, so that all lead times are scored on the same cases.

    Args:
        conf: config section ``inference``.
        data: config section ``data``.
        times: times of the data in minutes, ascending.
        calendar: calendar of the times.
        test: test period.

    Raises:
        ConfigError: if a time is listed twice, the list is empty, a range is empty or outside the test period, or an
            interval is not a multiple of the time step.
        DataError: if data for a listed time are missing, or no time of a range remains.
    """
    step = data.step_minutes
    lags = analysis_offsets_minutes(conf.ensemble)
    frame_offsets = list_frame_offsets(lags, data)
    # The config gives the latest time, a range of times, or a list of times.
    if conf.initial_times == "latest":
        selection = _select_latest(frame_offsets, times, calendar, step)
    elif isinstance(conf.initial_times, InitialTimesConfig):
        selection = _select_range(conf, data, times, calendar, test)
    else:
        selection = InitialTimes(_parse_named(conf.initial_times, calendar))
    # The user has asked for all times of a list, and of a range with an end, so an unusable time is an error.
    _require_frames(selection.minutes, times, calendar, frame_offsets)
    last_lead = choose_leads(conf, step)[-1]
    _require_observed(selection.minutes, times, calendar, data, max(lags), last_lead)
    return selection


def list_frame_offsets(lags: Sequence[int], data: DataConfig) -> list[int]:
    """Return the offsets of all input frames that a forecast reads, in minutes before the initial time.

    Args:
        lags: offsets of the analyses in minutes; each analysis is the last of its ``data.history_len`` input frames.
        data: config section ``data``.
    """
    offsets = []
    for lag in lags:
        for number in range(data.history_len):
            offsets.append(lag + number * data.step_minutes)
    return offsets


def _select_latest(frame_offsets: Sequence[int], times: np.ndarray, calendar: Calendar, step: int) -> InitialTimes:
    """Select the last time whose input frames are all in the data.

    If it is not the last time of the data, the result contains the reason. The error message contains `step`.

    Raises:
        DataError: if no time has all its input frames.
    """
    available = set(times.tolist())
    usable_times = [minutes for minutes in available if _first_missing(minutes, frame_offsets, available) is None]
    if not usable_times:
        raise DataError(
            f"{_KEY}: latest: no time of the data has all input frames of a forecast, the fields of the last "
            f"{format_duration(max(frame_offsets))} at data.timestep {format_duration(step)}; "
            f"{describe_span(times, calendar)}; name more files in data.sources"
        )
    latest_usable = max(usable_times)
    last = max(available)
    if latest_usable == last:
        return InitialTimes([latest_usable])
    # The last time of the data cannot be used; the message names the missing frame.
    missing = _first_missing(last, frame_offsets, available)
    left_out = (
        f"{_KEY}: latest: {calendar.format(latest_usable)}, not the last time of the data, {calendar.format(last)}, "
        f"which needs the fields of {calendar.format(missing)}, and the data do not have them"
    )
    return InitialTimes([latest_usable], left_out, data_lack=True)


def _first_missing(initial: int, offsets: Sequence[int], available: Collection[int]) -> int | None:
    """Return the first time `initial` - offset (in minutes) that is not in `available`; None if all are available."""
    for offset in offsets:
        if initial - offset not in available:
            return initial - offset
    return None


def _parse_named(names: Sequence[str], calendar: Calendar) -> list[int]:
    """Parse times in a list; return them ascending. An empty list or a repeated time is a `ConfigError`."""
    if not names:
        raise ConfigError(f"{_KEY}: [] has no times; list times, or remove the key to use all times of the test period")
    initial_times = sorted(calendar.parse(name, _KEY) for name in names)
    for minutes, next_minutes in itertools.pairwise(initial_times):
        if minutes == next_minutes:
            raise ConfigError(f"{_KEY}: {calendar.format(minutes)} is named twice; name each time once")
    return initial_times


def _select_range(
    conf: InferenceConfig, data: DataConfig, times: np.ndarray, calendar: Calendar, test: Split
) -> InitialTimes:
    """Select the times of a range; for a range without an end, only times with truth and all input frames.

    See `find_initial_times` for the arguments.

    Raises:
        ConfigError: if the range ends before its start, or starts after the test period.
        DataError: if no time remains.
    """
    time_range = conf.initial_times
    assert isinstance(time_range, InitialTimesConfig)
    every = parse_interval_minutes(time_range, data.step_minutes)
    first = test.first
    if time_range.start is not None:
        first = calendar.parse(time_range.start, f"{_KEY}.start")
    if time_range.end is not None:
        end = calendar.parse(time_range.end, f"{_KEY}.end")
        if end < first:
            raise ConfigError(f"{_KEY}: end {calendar.format(end)} is before start {calendar.format(first)}")
        return InitialTimes(list(range(first, end + 1, every)))
    if first > test.last:
        raise ConfigError(
            f"{_KEY}.start: {time_range.start} is after {test.describe(calendar)}, in which a range without an end "
            f"lies; give {_KEY}.end, or another data.splits.test"
        )

    # Without an end, all times of the test period are candidates. Count the reasons for skipped times.
    candidates = range(first, test.last + 1, every)
    obstacle_finder = _ObstacleFinder(conf, data, times, test)
    initial_times = []
    counts: Counter[_Obstacle] = Counter()
    for minutes in candidates:
        obstacle = obstacle_finder.find_obstacle(minutes)
        if obstacle is None:
            initial_times.append(minutes)
        else:
            counts[obstacle] += 1
    reasons = ", ".join(f"{count} {obstacle.description}" for obstacle, count in counts.items())

    if not initial_times:
        most_frequent = counts.most_common(1)[0][0]
        raise DataError(
            f"{test.describe(calendar)}: no forecast can begin at any of the {len(candidates)} times of {_KEY} in this "
            f"period: {reasons}; {describe_span(times, calendar)}; {most_frequent.way_out}"
        )
    if not counts:
        return InitialTimes(initial_times)
    left_out = f"{_KEY}: {counts.total()} of {len(candidates)} are left out: {reasons}; {test.describe(calendar)}"
    coverage = describe_coverage(times, test, calendar, data.step_minutes)
    if coverage:
        left_out = f"{left_out}: {coverage}"
    data_lack = any(obstacle.is_missing_data for obstacle in counts)
    return InitialTimes(initial_times, left_out, data_lack)


@dataclass(frozen=True)
class _Obstacle:
    """Reason why a forecast cannot start at a time of a range.

    Attributes:
        description: text that follows the number of times in a message, as in "3 before the period".
        way_out: advice for the user.
        is_missing_data: True if data are missing; False if the limits of the test period are the reason.
    """

    description: str
    way_out: str
    is_missing_data: bool = True


class _ObstacleFinder:
    """Finder of reasons why a forecast cannot start at a time of a range without an end."""

    def __init__(self, conf: InferenceConfig, data: DataConfig, times: np.ndarray, test: Split) -> None:
        step = data.step_minutes
        self._test = test
        self._available = set(times.tolist())
        # A forecast ends at the last step within the lead time.
        self._last_lead = parse_duration(conf.lead_time) // step * step
        self._lead_times = range(step, self._last_lead + 1, step)
        self._input_offsets = [number * step for number in range(data.history_len)]
        self._frame_offsets = list_frame_offsets(analysis_offsets_minutes(conf.ensemble), data)

        # The possible obstacles, each with advice for the user.
        length = f"inference.lead_time {conf.lead_time}"
        shorten = f"shorten inference.lead_time, or list the times in {_KEY}, which then need no truth"
        add_files = "name more files in data.sources"
        self._before_period = _Obstacle("before the period", f"give {_KEY}.start within it", is_missing_data=False)
        self._no_data = _Obstacle(
            "at which the data have nothing",
            f"choose times that the data have ({_KEY}.start, or a list of them; data.splits.test), or {add_files}",
        )
        self._ends_after_period = _Obstacle(
            f"whose {length} ends after the period", f"{shorten}, or lengthen data.splits.test", is_missing_data=False
        )
        self._no_truth = _Obstacle(f"without truth in the data at every step of {length}", f"{shorten}, or {add_files}")
        self._no_input = _Obstacle(
            f"without the {data.history_len} input frames in the period",
            f"choose a longer data.splits.test, or {add_files}",
            is_missing_data=False,
        )
        self._no_analyses = _Obstacle(
            f"without the analyses up to {format_duration(max(self._frame_offsets))} before, from which "
            "inference.ensemble starts",
            f"begin later (data.splits.test), shorten lagged or cycles of inference.ensemble, or {add_files}",
        )

    def find_obstacle(self, minutes: int) -> _Obstacle | None:
        """Return the first reason why no forecast can start at a time (in minutes); None if a forecast can start."""
        # If there are several reasons, the first one below is reported; the simplest comes first.
        if minutes < self._test.first:
            return self._before_period
        if minutes not in self._available:
            return self._no_data
        if minutes + self._last_lead > self._test.last:
            return self._ends_after_period
        if any(minutes + lead not in self._available for lead in self._lead_times):
            return self._no_truth
        for offset in self._input_offsets:
            frame_time = minutes - offset
            if frame_time not in self._available or frame_time < self._test.first:
                return self._no_input
        if _first_missing(minutes, self._frame_offsets, self._available) is not None:
            return self._no_analyses
        return None


def parse_interval_minutes(time_range: InitialTimesConfig, step: int) -> int:
    """Return the interval between the initial times of a range, in minutes.

    Args:
        time_range: ``inference.initial_times``, given as a range.
        step: time step of the data in minutes.

    Raises:
        ConfigError: if the interval is not a multiple of the time step.
    """
    every = parse_duration(time_range.every)
    if every % step:
        raise ConfigError(
            f"{_KEY}.every: {time_range.every} is not a multiple of data.timestep {format_duration(step)}"
        )
    return every


def choose_leads(conf: InferenceConfig, step: int) -> list[int]:
    """Return the lead times to write, in minutes, ascending.

    These are the lead times in ``lead_times``, if given; otherwise the multiples of ``output_every`` (default: the time
    step) up to ``lead_time``.

    Args:
        conf: config section ``inference``.
        step: time step of the data in minutes.

    Raises:
        ConfigError: if ``output_every`` is not a multiple of the time step, or is longer than ``lead_time``.
    """
    if conf.lead_times is not None:
        return [parse_duration(lead) for lead in conf.lead_times]
    every = step
    if conf.output_every is not None:
        every = parse_duration(conf.output_every)
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


def _require_frames(
    initial_times: Sequence[int], times: np.ndarray, calendar: Calendar, frame_offsets: Sequence[int]
) -> None:
    """Refuse initial times with an input frame that is not among `times`, the times of the data.

    Raises:
        DataError: if a frame is missing; the message names the first initial time concerned and the missing time.
    """
    available = set(times.tolist())
    # (initial time, time of its first missing frame)
    missing_times = []
    for initial in initial_times:
        missing = _first_missing(initial, frame_offsets, available)
        if missing is not None:
            missing_times.append((initial, missing))
    if not missing_times:
        return
    initial, missing = missing_times[0]
    others = ""
    if len(missing_times) > 1:
        others = f"; frames of {len(missing_times) - 1} others of {len(initial_times)} initial times are missing, too"
    raise DataError(
        f"{_KEY}: {calendar.format(initial)} needs the fields of {calendar.format(missing)}, which the data do not "
        f"have{others}; {describe_span(times, calendar)}; choose other times, or add files to data.sources"
    )


def _require_observed(
    initial_times: Sequence[int],
    times: np.ndarray,
    calendar: Calendar,
    data: DataConfig,
    longest_lag: int,
    last_lead: int,
) -> None:
    """Refuse initial times whose forecasts need observed forcing that is missing in the data.

    Each step reads the forcing of its input frame, from the earliest analysis to the last step. A mean or sum with
    ``window: next`` is stored at the end of the step, so it is read one step later.

    The earliest analysis is `longest_lag` minutes before the initial time; `last_lead` is the longest lead time.

    Raises:
        DataError: if forcing is missing; the message names the variable, the initial time and the missing time.
    """
    available = set(times.tolist())
    step = data.step_minutes
    for channel in data.channel_map().group("dynamic_forcing"):
        options = data.options_of(channel.variable)
        if channel.source != "data" or options.in_forecast != "observed":
            continue
        # A window after the frame ends one step later, and the data label a window by its end.
        uses_next_window = options.temporal != "instant" and options.window == "next"
        shift = step if uses_next_window else 0
        for initial in initial_times:
            for lead in range(shift - longest_lag, last_lead + shift, step):
                if initial + lead in available:
                    continue
                raise DataError(
                    f"{_KEY}: the forecast from {calendar.format(initial)} needs {channel.variable} (in_forecast: "
                    f"observed) at {calendar.format(initial + lead)}, which the data do not have; "
                    f"{describe_span(times, calendar)}; shorten inference.lead_time, name other times, or set "
                    f"data.variable_options.{channel.variable}.in_forecast: persist"
                )
