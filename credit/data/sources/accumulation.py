"""Time windows of a variable's values: instants, or means and accumulations over a time step.

A value at time t stands for the window (t - dt, t] that ends there (the label of ERA5 and CF). Files may contain these
values, values over shorter intervals, or values accumulated since the start of a forecast, as the precipitation of
ERA-Interim.
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
# A time that no file has.
_NEVER = -(10**12)


@dataclass(frozen=True)
class TimeAggregation:
    """Values of one variable as weighted sums of the values in its files.

    Attributes:
        times: (M,) int64 minutes, increasing, at which there is a value.
        terms: pairs of (M,) weights and (M,) indices in the times of the series; values of weight 0 are not read.
    """

    times: np.ndarray
    terms: Sequence[tuple[np.ndarray, np.ndarray]]

    def at(self, index: int) -> tuple[list[float], list[int]]:
        """Return the weights and the indices in the series of the values that are added up at one time."""
        term_weights = []
        term_indices = []
        for weights, indices in self.terms:
            if weights[index]:
                term_weights.append(float(weights[index]))
                term_indices.append(int(indices[index]))
        return term_weights, term_indices


def build_time_aggregation(name: str, series: VariableSeries, conf: DataConfig, calendar: Calendar) -> TimeAggregation:
    """Return how the values of a variable over ``data.timestep`` are computed from those in its files.

    Raises:
        DataError: if the intervals in the files do not add up to the time step, or it is not known where an
            accumulation begins.
    """
    temporal = conf.options_of(name).temporal
    if temporal == "instant":
        for file_variable in series.file_variables:
            methods = file_variable.layout.attributes.get("cell_methods", "")
            if "time: mean" in methods or "time: sum" in methods:
                logger.warning(
                    '%s is taken as instantaneous; its cell_methods say "%s" (data.variable_options)', name, methods
                )
                break
        weights = np.ones(len(series.times))
        return TimeAggregation(series.times, [(weights, np.arange(len(series.times)))])
    begins = _interval_begins(name, series, calendar)
    if temporal == "deaccumulate":
        return _deaccumulate(name, series, conf, begins)
    return _sum_intervals(name, series, conf, begins)


def _interval_begins(name: str, series: VariableSeries, calendar: Calendar) -> np.ndarray | None:
    """Return (N,) minutes at which the intervals of the values begin, None if the files have no time bounds.

    Raises:
        DataError: for an interval that does not end at its label.
    """
    bounds_of_file = [file_variable.layout.window_bounds for file_variable in series.file_variables]
    if any(bounds is None for bounds in bounds_of_file):
        return None
    bounds = []
    for file_index, position in zip(series.file_index, series.position, strict=True):
        bounds.append(bounds_of_file[file_index][position])
    bounds_N2 = np.stack(bounds)
    wrong = np.flatnonzero(bounds_N2[:, 1] != series.times)
    if len(wrong):
        index = wrong[0]
        begin = calendar.format(bounds_N2[index, 0])
        end = calendar.format(bounds_N2[index, 1])
        raise DataError(
            f"{series.file_variables[series.file_index[index]].path}: the value of {name} at "
            f"{calendar.format(series.times[index])} covers {begin} to {end}; a mean or an accumulation must carry the "
            "label of its end: shift the time axis"
        )
    return bounds_N2[:, 0]


def _sum_intervals(name: str, series: VariableSeries, conf: DataConfig, begins: np.ndarray | None) -> TimeAggregation:
    """Combine one or more intervals of equal length to windows of a time step."""
    step = conf.step_minutes
    times = series.times
    temporal = conf.options_of(name).temporal
    if begins is None:
        _require_one_spacing(name, series)
        lengths = np.unique(np.diff(times))
    else:
        lengths = np.unique(times - begins)
    length = int(lengths[0]) if len(lengths) else step
    path = series.file_variables[0].path
    rule = f"data.variable_options.{name}.temporal is {temporal}, so its values must make up data.timestep"
    if begins is not None and len(lengths) > 1:
        spans = " and ".join(format_duration(int(minutes)) for minutes in lengths[:2])
        raise DataError(
            f"{path}: {rule}, but they cover intervals of {spans}; if each runs from the start of a forecast, set "
            "temporal: deaccumulate"
        )
    if length <= 0 or step % length:
        raise DataError(
            f"{path}: {rule} {conf.timestep}, but they cover {format_duration(length)} each, which does not divide it; "
            "rewrite them to the step first"
        )
    count = step // length
    if count > 1:
        operation = "averages" if temporal == "mean" else "sums"
        logger.info("%s: %s of %d intervals of %s", name, operation, count, format_duration(length))
    weight = 1.0 / count if temporal == "mean" else 1.0
    weights = np.full(len(times), weight)
    return _keep_complete(name, series, [(weights, times - number * length) for number in range(count)])


def _require_one_spacing(name: str, series: VariableSeries) -> None:
    """Refuse sources whose values cover intervals of different lengths, if only the spacing of the times tells them.

    Raises:
        DataError: naming two sources.
    """
    source_of_file = np.array([file_variable.source_number for file_variable in series.file_variables])
    sources = source_of_file[series.file_index]
    spacings: dict[int, int] = {}
    for number in np.unique(sources).tolist():
        times = series.times[sources == number]
        if len(times) > 1:
            spacings[number] = int(np.diff(times).min())
    if len(set(spacings.values())) > 1:
        described = ", ".join(f"data.sources.{number}: {format_duration(each)}" for number, each in spacings.items())
        raise DataError(
            f"{name}: its sources give values at different distances ({described}) and have no time bounds, so what "
            "each value covers is not known; write time bounds into the files, or bring all to one interval"
        )


def _deaccumulate(name: str, series: VariableSeries, conf: DataConfig, begins: np.ndarray | None) -> TimeAggregation:
    """Take differences of values that are accumulated since the start of a forecast."""
    times = series.times
    restarts = conf.options_of(name).restarts
    if begins is None:
        if restarts is None:
            raise DataError(
                f"{series.file_variables[0].path}: data.variable_options.{name}.temporal is deaccumulate, but neither "
                "time "
                f"bounds nor data.variable_options.{name}.restarts say where an accumulation begins; name the hours "
                "(UTC), such "
                "as [0, 12]"
            )
        begins = _last_restart(times, restarts)
    begin_of = dict(zip(times.tolist(), begins.tolist(), strict=True))
    # For each time, the pairs of weight and time of the values that make up its window, from the end backwards.
    terms_of_time: list[list[tuple[float, int]]] = []
    for time in times.tolist():
        terms: list[tuple[float, int]] = []
        window_begin = time - conf.step_minutes
        end = time
        while end > window_begin:
            # For a time without a value the term stays, and `_keep_complete` drops the window.
            begin = begin_of.get(end, window_begin)
            if begin >= end:
                # This is the zero at the start of a forecast; the accumulation that ended here is in no file.
                terms.append((1.0, _NEVER))
                break
            terms.append((1.0, end))
            if begin < window_begin:
                terms.append((-1.0, window_begin))
            end = max(begin, window_begin)
        terms_of_time.append(terms)
    num_terms = max(len(terms) for terms in terms_of_time)
    for terms, time in zip(terms_of_time, times.tolist(), strict=True):
        terms += [(0.0, time)] * (num_terms - len(terms))
    table_NK2 = np.array(terms_of_time)
    columns = [(table_NK2[:, k, 0], table_NK2[:, k, 1].astype(np.int64)) for k in range(num_terms)]
    return _keep_complete(name, series, columns)


def _last_restart(times: np.ndarray, hours: Sequence[int]) -> np.ndarray:
    """Return the last restart before each time, in minutes; a value at a restart belongs to the period before it."""
    candidates = []
    for hour in hours:
        offset = hour * 60
        candidates.append((times - 1 - offset) // _DAY_MINUTES * _DAY_MINUTES + offset)
    return np.max(candidates, axis=0)


def _keep_complete(
    name: str, series: VariableSeries, terms: Sequence[tuple[np.ndarray, np.ndarray]]
) -> TimeAggregation:
    """Return the windows of which every term exists.

    Args:
        name: the variable.
        series: its values in the files.
        terms: pairs of (N,) weights and (N,) times.
    """
    times = series.times
    is_complete = np.all([np.isin(term_times, times) for _, term_times in terms], axis=0)
    if not is_complete.any():
        raise DataError(
            f"{series.file_variables[0].path}: {name} has {len(times)} times, which make up no whole window of "
            "data.timestep; add the times that are missing, or lengthen the period"
        )
    complete_terms = []
    for weights, term_times in terms:
        complete_terms.append((weights[is_complete], np.searchsorted(times, term_times[is_complete])))
    return TimeAggregation(times[is_complete], complete_terms)
