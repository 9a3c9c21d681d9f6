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
from credit.forecast.ensemble.perturbations import compute_analysis_offsets
from credit.parallel.process_info import read_process_info

logger = logging.getLogger(__name__)

_KEY = "inference.initial_times"


@dataclass(frozen=True)
class InitialTimes:
    """Initial times that a config selects.

    Attributes:
        minutes: initial times in minutes, ascending.
        skip_message: message for the log; empty if no time is skipped. For a range: number of skipped times and the
            reasons. For ``initial_times: latest``: the reason why the last time of the data is not used.
        has_missing_data: True if missing data are a reason for skipped times, not only the limits of the test period.
    """

    minutes: list[int]
    skip_message: str = ""
    has_missing_data: bool = False


def choose_initial_times(
    conf: InferenceConfig, data: DataConfig, times: np.ndarray, calendar: Calendar, test: Split
) -> list[int]:
    """Return the initial times of ``inference.initial_times`` in minutes; rank 0 logs why times are skipped.

    See `find_initial_times` for arguments and errors.
    """
    selection = find_initial_times(conf, data, times, calendar, test)
    if selection.skip_message and read_process_info().is_main:
        level = logging.WARNING if selection.has_missing_data else logging.INFO
        logger.log(level, "%s", selection.skip_message)
    return selection.minutes


def find_initial_times(
    conf: InferenceConfig, data: DataConfig, times: np.ndarray, calendar: Calendar, test: Split
) -> InitialTimes:
    """Find the initial times of ``inference.initial_times``, with the reasons for skipped times.

    Every initial time needs its input frames. It also needs earlier analyses if an ensemble starts from earlier
    analyses, and observed forcing if the config uses observed forcing. In a range without an end, a time is used only
    if the test period contains the truth at every step up to the longest lead time. So all lead times are scored on
    the same cases.

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
    lags = compute_analysis_offsets(conf.ensemble)
    frame_offsets = list_frame_offsets(lags, data)

    if conf.initial_times == "latest":
        selection = _select_latest(frame_offsets, times, calendar, step)
    elif isinstance(conf.initial_times, InitialTimesConfig):
        selection = _select_range(conf, data, times, calendar, test)
    else:
        selection = InitialTimes(_parse_listed_times(conf.initial_times, calendar))
    # The config names each time of a list or of a range with an end, so a time that cannot be used is an error.
    _require_frames(selection.minutes, times, calendar, frame_offsets)
    last_lead = list_output_leads(conf, step)[-1]
    _require_observed_forcing(selection.minutes, times, calendar, data, max(lags), last_lead)
    return selection


def list_frame_offsets(lags: Sequence[int], data: DataConfig) -> list[int]:
    """Return the offsets of all input frames that a forecast reads, in minutes before the initial time.

    Args:
        lags: offsets of the analyses in minutes. Each analysis consists of ``data.history_len`` input frames, and its
            offset is the offset of the last of these frames.
        data: config section ``data``.
    """
    offsets = []
    for lag in lags:
        for number in range(data.history_len):
            offsets.append(lag + number * data.step_minutes)
    return offsets


def _select_latest(frame_offsets: Sequence[int], times: np.ndarray, calendar: Calendar, step: int) -> InitialTimes:
    """Select the latest time whose input frames are all in the data.

    If this is not the last time of the data, `skip_message` of the result gives the reason. `step` is the time step of
    the data in minutes, for the error message.

    Raises:
        DataError: if no time has all its input frames.
    """
    available = set(times.tolist())
    usable_times = [minutes for minutes in available if _find_first_missing(minutes, frame_offsets, available) is None]
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
    missing = _find_first_missing(last, frame_offsets, available)
    skip_message = (
        f"{_KEY}: latest: the forecast starts at {calendar.format(latest_usable)}, not at the last time of the data, "
        f"{calendar.format(last)}, because the data do not contain the input frame {calendar.format(missing)}"
    )
    return InitialTimes([latest_usable], skip_message, has_missing_data=True)


def _find_first_missing(initial: int, offsets: Sequence[int], available: Collection[int]) -> int | None:
    """Return the first of the times `initial` - offset (in minutes) that is not in `available`; None if all are."""
    for offset in offsets:
        if initial - offset not in available:
            return initial - offset
    return None


def _parse_listed_times(names: Sequence[str], calendar: Calendar) -> list[int]:
    """Return the listed times in minutes, ascending; raise ConfigError for an empty list or a repeated time."""
    if not names:
        raise ConfigError(f"{_KEY}: [] is empty; list times, or remove the key to use all times of the test period")
    initial_times = sorted(calendar.parse(name, _KEY) for name in names)
    for minutes, next_minutes in itertools.pairwise(initial_times):
        if minutes == next_minutes:
            raise ConfigError(f"{_KEY}: {calendar.format(minutes)} is listed twice; list each time once")
    return initial_times


def _select_range(
    conf: InferenceConfig, data: DataConfig, times: np.ndarray, calendar: Calendar, test: Split
) -> InitialTimes:
    """Select the times of a range; in a range without an end, skip times without truth or without all input frames.

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
            f"{_KEY}.start: {time_range.start} is after {test.describe(calendar)}, but a range without an end must "
            f"not start after the end of this period; set {_KEY}.end, or change data.splits.test"
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
            f"period: {reasons}; {describe_span(times, calendar)}; {most_frequent.advice}"
        )
    if not counts:
        return InitialTimes(initial_times)
    skip_message = (
        f"{_KEY}: {counts.total()} of {len(candidates)} times are skipped: {reasons}; {test.describe(calendar)}"
    )
    coverage = describe_coverage(times, test, calendar, data.step_minutes)
    if coverage:
        skip_message = f"{skip_message}: {coverage}"
    has_missing_data = any(obstacle.is_missing_data for obstacle in counts)
    return InitialTimes(initial_times, skip_message, has_missing_data)


@dataclass(frozen=True)
class _Obstacle:
    """Reason why a forecast cannot start at a time of a range.

    Attributes:
        description: words that follow the number of times in a message, as in "3 before the period".
        advice: advice for the user, for the error message.
        is_missing_data: True if the reason is missing data; False if the reason is a limit of the test period.
    """

    description: str
    advice: str
    is_missing_data: bool = True


class _ObstacleFinder:
    """Finder of the reason why a forecast cannot start at a time of a range without an end."""

    def __init__(self, conf: InferenceConfig, data: DataConfig, times: np.ndarray, test: Split) -> None:
        step = data.step_minutes
        self._test = test
        self._available = set(times.tolist())
        # A forecast ends at the last step within the lead time.
        self._last_lead = parse_duration(conf.lead_time) // step * step
        self._lead_times = range(step, self._last_lead + 1, step)
        self._input_offsets = [number * step for number in range(data.history_len)]
        self._frame_offsets = list_frame_offsets(compute_analysis_offsets(conf.ensemble), data)

        # The possible obstacles, each with advice for the user.
        length = f"inference.lead_time {conf.lead_time}"
        shorten = f"shorten inference.lead_time, or list the times in {_KEY} (listed times need no truth)"
        add_files = "name more files in data.sources"
        self._before_period = _Obstacle("before the period", f"give {_KEY}.start within it", is_missing_data=False)
        self._no_data = _Obstacle(
            "that are not in the data",
            f"choose times that are in the data ({_KEY}.start, or a list; data.splits.test), or {add_files}",
        )
        self._ends_after_period = _Obstacle(
            f"whose {length} ends after the period", f"{shorten}, or lengthen data.splits.test", is_missing_data=False
        )
        self._no_truth = _Obstacle(f"without truth at every step of {length}", f"{shorten}, or {add_files}")
        self._no_input = _Obstacle(
            f"without all {data.history_len} input frames in the period",
            f"choose a longer data.splits.test, or {add_files}",
            is_missing_data=False,
        )
        self._no_analyses = _Obstacle(
            f"without the earlier analyses (up to {format_duration(max(self._frame_offsets))}) that "
            "inference.ensemble needs",
            f"begin later (data.splits.test), shorten lagged or cycles of inference.ensemble, or {add_files}",
        )

    def find_obstacle(self, minutes: int) -> _Obstacle | None:
        """Return the first reason why no forecast can start at a time (in minutes); None if a forecast can start."""
        # If there are several reasons, only the first is reported. The simplest reason comes first.
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
        if _find_first_missing(minutes, self._frame_offsets, self._available) is not None:
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


def list_output_leads(conf: InferenceConfig, step: int) -> list[int]:
    """Return the lead times to write, in minutes, ascending.

    The lead times are those in ``inference.lead_times``, if this key is set. Otherwise they are the multiples of
    ``inference.output_every`` (default: the time step) up to ``inference.lead_time``.

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
    """Raise DataError if an input frame of an initial time is not in `times`, the times of the data.

    The message names the first initial time with a missing frame, and the time of this frame. All times are in minutes.
    """
    available = set(times.tolist())
    missing_times = []  # (initial time, time of its first missing frame)
    for initial in initial_times:
        missing = _find_first_missing(initial, frame_offsets, available)
        if missing is not None:
            missing_times.append((initial, missing))
    if not missing_times:
        return
    initial, missing = missing_times[0]
    others = ""
    if len(missing_times) > 1:
        others = f"; {len(missing_times) - 1} others of {len(initial_times)} initial times also lack input frames"
    raise DataError(
        f"{_KEY}: {calendar.format(initial)} needs the fields of {calendar.format(missing)}, which are not in the data"
        f"{others}; {describe_span(times, calendar)}; choose other times, or add files to data.sources"
    )


def _require_observed_forcing(
    initial_times: Sequence[int],
    times: np.ndarray,
    calendar: Calendar,
    data: DataConfig,
    longest_lag: int,
    last_lead: int,
) -> None:
    """Raise DataError if the data lack observed forcing that a forecast needs.

    Each step, from the earliest analysis to the longest lead time, reads the forcing of its input frame. A mean or sum
    with ``window: next`` is stored at the time at which the step ends, so this time must also be in the data. The
    earliest analysis is `longest_lag` minutes before the initial time; `last_lead` is the longest lead time in minutes.
    The message names the variable, the initial time and the missing time.
    """
    available = set(times.tolist())
    step = data.step_minutes
    for channel in data.channel_map().group("dynamic_forcing"):
        options = data.options_of(channel.variable)
        if channel.source != "data" or options.in_forecast != "observed":
            continue
        # The data label a window with its end, and a window after the frame ends one step later.
        uses_next_window = options.temporal != "instant" and options.window == "next"
        shift = step if uses_next_window else 0
        for initial in initial_times:
            for lead in range(shift - longest_lag, last_lead + shift, step):
                if initial + lead in available:
                    continue
                raise DataError(
                    f"{_KEY}: the forecast from {calendar.format(initial)} needs {channel.variable} (in_forecast: "
                    f"observed) at {calendar.format(initial + lead)}, which is not in the data; "
                    f"{describe_span(times, calendar)}; shorten inference.lead_time, choose other times, or set "
                    f"data.variable_options.{channel.variable}.in_forecast: persist"
                )
