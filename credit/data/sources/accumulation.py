"""Values of a variable over the time step of a run, computed from the values in its files.

Values are instantaneous, or means or accumulations over a window. For a run with the time step dt, the mean or
accumulation at time t covers the window (t - dt, t], which is labelled with its end as in ERA5 and CF. Files may
contain these values, values over shorter intervals, or values accumulated since the start of a forecast, such as the
precipitation of ERA-Interim.

Letters of shapes: N times in the files, M times at which the run has a value.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar, format_duration
from credit.config.sections.data import DataConfig
from credit.data.sources.series import VariableSeries
from credit.errors import DataError

logger = logging.getLogger(__name__)

_DAY_MINUTES = 1440
# A time in minutes that no file has. A window that needs this time is incomplete and is skipped.
_NEVER = -(10**12)


@dataclass(frozen=True)
class TimeAggregation:
    """Weighted sums that compute the values of one variable over the time step from the values in its files.

    Attributes:
        times: (M,) int64 minutes since 1900, increasing: the times at which the variable has a value.
        terms: terms of the sums. A term is a pair of (M,) float64 weights and (M,) int64 indices in
            `VariableSeries.times` of the variable. Values of weight 0 are not read.
    """

    times: np.ndarray
    terms: Sequence[tuple[np.ndarray, np.ndarray]]

    def weights_and_indices_at(self, index: int) -> tuple[list[float], list[int]]:
        """Return the terms of the weighted sum for one time: the weights, and the indices of the values in the series.

        Args:
            index: index of the time in `times`.
        """
        term_weights = []
        term_indices = []
        for weights, indices in self.terms:
            if weights[index]:
                term_weights.append(float(weights[index]))
                term_indices.append(int(indices[index]))
        return term_weights, term_indices


def build_time_aggregation(name: str, series: VariableSeries, conf: DataConfig, calendar: Calendar) -> TimeAggregation:
    """Return the weighted sums that compute a variable over ``data.timestep`` from the values in its files.

    Args:
        name: name of the variable.
        series: values of the variable in its files.
        conf: the ``data`` section of the config; ``variable_options.NAME.temporal`` states whether the values are
            instantaneous, means or accumulations.
        calendar: calendar of the times, for error messages.

    Raises:
        DataError: if the intervals in the files do not add up to the time step, or the beginning of an accumulation is
            not known.
    """
    temporal = conf.options_of(name).temporal
    if temporal == "instant":
        _warn_of_cell_methods(name, series)
        # Every value is used unchanged.
        weights = np.ones(len(series.times))
        return TimeAggregation(series.times, [(weights, np.arange(len(series.times)))])
    interval_begins = _find_interval_begins(name, series, calendar)
    if temporal == "deaccumulate":
        return _build_differences(name, series, conf, interval_begins)
    return _build_sums(name, series, conf, interval_begins)


def _warn_of_cell_methods(name: str, series: VariableSeries) -> None:
    """Log a warning if the files of a variable that is treated as instantaneous declare means or sums over time."""
    for file_variable in series.file_variables:
        methods = file_variable.layout.attributes.get("cell_methods", "")
        if "time: mean" in methods or "time: sum" in methods:
            logger.warning(
                '%s is treated as instantaneous, but its cell_methods are "%s" (data.variable_options)', name, methods
            )
            return


def _find_interval_begins(name: str, series: VariableSeries, calendar: Calendar) -> np.ndarray | None:
    """Return the beginning of the interval of each value, (N,) minutes since 1900; None if a file has no time bounds.

    Raises:
        DataError: if the interval of a value does not end at the time of the value.
    """
    bounds_of_file = [file_variable.layout.window_bounds for file_variable in series.file_variables]
    if any(bounds is None for bounds in bounds_of_file):
        return None
    # Put the bounds of all files in the order of the series.
    bounds = []
    for file_index, position in zip(series.file_index, series.position, strict=True):
        bounds.append(bounds_of_file[file_index][position])
    bounds_N2 = np.stack(bounds)
    wrong_indices = np.flatnonzero(bounds_N2[:, 1] != series.times)
    if len(wrong_indices):
        index = wrong_indices[0]
        begin = calendar.format(bounds_N2[index, 0])
        end = calendar.format(bounds_N2[index, 1])
        raise DataError(
            f"{series.file_variables[series.file_index[index]].path}: the value of {name} at "
            f"{calendar.format(series.times[index])} covers {begin} to {end}; the time of a mean or an accumulation "
            "must be the end of its interval: shift the time axis"
        )
    return bounds_N2[:, 0]


def _build_sums(
    name: str, series: VariableSeries, conf: DataConfig, interval_begins: np.ndarray | None
) -> TimeAggregation:
    """Return the values over each time step as sums or means of one or more intervals of equal length.

    Args:
        name: name of the variable.
        series: values of the variable in its files, at N times.
        conf: the ``data`` section of the config.
        interval_begins: (N,) beginning of the interval of each value in minutes since 1900; None to use the spacing of
            the times as the length of the intervals.

    Raises:
        DataError: if the intervals have different lengths, or their length does not divide the time step.
    """
    step = conf.step_minutes
    times = series.times
    temporal = conf.options_of(name).temporal
    if interval_begins is None:
        _require_equal_spacing(name, series)
        lengths = np.unique(np.diff(times))
    else:
        lengths = np.unique(times - interval_begins)
    # Gaps make some distances longer, so the shortest distance is used. A single value without bounds is assumed to
    # cover one time step.
    interval_length = int(lengths[0]) if len(lengths) else step
    path = series.file_variables[0].path
    rule = f"data.variable_options.{name}.temporal is {temporal}, so the values must add up to data.timestep"
    if interval_begins is not None and len(lengths) > 1:
        spans = " and ".join(format_duration(int(minutes)) for minutes in lengths[:2])
        raise DataError(
            f"{path}: {rule}, but they cover intervals of {spans}; if each interval begins at the start of a forecast, "
            "set temporal: deaccumulate"
        )
    if interval_length <= 0 or step % interval_length:
        raise DataError(
            f"{path}: {rule} {conf.timestep}, but each value covers {format_duration(interval_length)}, which does not "
            "divide the time step; rewrite the values to the time step first"
        )
    num_intervals = step // interval_length
    if num_intervals > 1:
        operation = "averages" if temporal == "mean" else "sums"
        logger.info("%s: %s of %d intervals of %s", name, operation, num_intervals, format_duration(interval_length))
    weight = 1.0
    if temporal == "mean":
        weight = 1.0 / num_intervals
    weights = np.full(len(times), weight)
    # A window consists of `num_intervals` intervals, listed from its end backwards.
    terms = [(weights, times - number * interval_length) for number in range(num_intervals)]
    return _select_complete_windows(name, series, terms)


def _require_equal_spacing(name: str, series: VariableSeries) -> None:
    """Raise DataError if the times of the sources have different spacings.

    For values without time bounds, the spacing of the times is the only information about the intervals of the values.

    Raises:
        DataError: if the spacings differ; the message names the sources and their spacings.
    """
    source_of_file = np.array([file_variable.source_number for file_variable in series.file_variables])
    source_of_time = source_of_file[series.file_index]
    # Mapping from the index of a source to the smallest distance between its times, in minutes.
    spacings: dict[int, int] = {}
    for number in np.unique(source_of_time).tolist():
        times = series.times[source_of_time == number]
        if len(times) > 1:
            spacings[number] = int(np.diff(times).min())
    if len(set(spacings.values())) > 1:
        descriptions = [f"data.sources.{number}: {format_duration(spacing)}" for number, spacing in spacings.items()]
        described = ", ".join(descriptions)
        raise DataError(
            f"{name}: its sources have values at different intervals ({described}) and no time bounds, so the interval "
            "of each value is not known; write time bounds into the files, or use the same interval in all sources"
        )


def _build_differences(
    name: str, series: VariableSeries, conf: DataConfig, interval_begins: np.ndarray | None
) -> TimeAggregation:
    """Return the values over each time step as differences of values accumulated since the start of a forecast.

    Args:
        name: name of the variable.
        series: values of the variable in its files, at N times.
        conf: the ``data`` section of the config.
        interval_begins: (N,) beginning of the accumulation of each value in minutes since 1900; None if the files have
            no time bounds. The config must then define the hours at which accumulations restart.

    Raises:
        DataError: if neither the files nor the config define the beginning of an accumulation, or no window is
            complete.
    """
    times = series.times
    restarts = conf.options_of(name).restarts
    if interval_begins is None:
        if restarts is None:
            raise DataError(
                f"{series.file_variables[0].path}: data.variable_options.{name}.temporal is deaccumulate, but neither "
                f"time bounds nor data.variable_options.{name}.restarts define where an accumulation begins; set "
                "restarts to the hours (UTC), such as [0, 12]"
            )
        interval_begins = _find_last_restarts(times, restarts)
    begin_of = dict(zip(times.tolist(), interval_begins.tolist(), strict=True))
    # For each time, the pairs (weight, time) of the values that add up to its window, from the end backwards. A window
    # that contains a restart is the sum of the accumulation before the restart and the accumulation after the restart.
    terms_of_time: list[list[tuple[float, int]]] = []
    for time in times.tolist():
        terms: list[tuple[float, int]] = []
        window_begin = time - conf.step_minutes
        end = time
        while end > window_begin:
            # If there is no value at `end`, `_select_complete_windows` drops the window.
            begin = begin_of.get(end, window_begin)
            if begin >= end:
                # This value is the 0 at the start of a forecast; no file has the accumulation that ended here.
                terms.append((1.0, _NEVER))
                break
            terms.append((1.0, end))
            # The accumulation before the window is subtracted.
            if begin < window_begin:
                terms.append((-1.0, window_begin))
            end = max(begin, window_begin)
        terms_of_time.append(terms)
    # Shorter sums are padded with terms of weight 0, so that all sums have the same number of terms K.
    num_terms = max(len(terms) for terms in terms_of_time)
    for terms, time in zip(terms_of_time, times.tolist(), strict=True):
        terms += [(0.0, time)] * (num_terms - len(terms))
    # The last axis is (weight, time); float64 represents the minutes exactly.
    table_NK2 = np.array(terms_of_time)
    weights_NK = table_NK2[..., 0]
    times_NK = table_NK2[..., 1].astype(np.int64)
    terms_by_number = [(weights_NK[:, k], times_NK[:, k]) for k in range(num_terms)]
    return _select_complete_windows(name, series, terms_by_number)


def _find_last_restarts(times: np.ndarray, hours: Sequence[int]) -> np.ndarray:
    """Return the last restart of the accumulation before each time, (N,) minutes since 1900.

    A restart at the time itself is ignored, because a value at a restart belongs to the accumulation that ends there.

    Args:
        times: (N,) minutes since 1900.
        hours: hours of the day (UTC) at which accumulations restart.
    """
    candidates = []
    for hour in hours:
        # Minutes start at a midnight, so multiples of a day are midnights. The 1 excludes a restart at the time itself.
        offset = hour * 60
        candidates.append((times - 1 - offset) // _DAY_MINUTES * _DAY_MINUTES + offset)
    return np.max(candidates, axis=0)


def _select_complete_windows(
    name: str, series: VariableSeries, terms: Sequence[tuple[np.ndarray, np.ndarray]]
) -> TimeAggregation:
    """Return the weighted sums of the windows for which the files have all terms.

    Args:
        name: name of the variable.
        series: values of the variable in its files, at N times.
        terms: terms of the sums for a window that ends at each of the N times. A term is a pair of (N,) weights and
            (N,) times in minutes since 1900.

    Raises:
        DataError: if no window is complete.
    """
    times = series.times
    is_complete = np.all([np.isin(term_times, times) for _, term_times in terms], axis=0)
    if not is_complete.any():
        raise DataError(
            f"{series.file_variables[0].path}: {name} has {len(times)} times, which do not add up to a complete window "
            "of data.timestep; add the missing times, or lengthen the period"
        )
    # `times` contains the time of each of these terms, so the search returns its index.
    complete_terms = []
    for weights, term_times in terms:
        complete_terms.append((weights[is_complete], np.searchsorted(times, term_times[is_complete])))
    return TimeAggregation(times[is_complete], complete_terms)
