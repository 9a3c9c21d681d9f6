"""What a variable's values stand for: instants, or means and accumulations over a time step.

A value at time t stands for the window (t - dt, t] that ends there (ERA5's and CF's label). Files may give it as it is,
in shorter pieces, or running from the start of a forecast, as ERA-Interim's precipitation does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar, format_duration
from credit.config.schema_data import DataConfig
from credit.data.sources.series import VariableSeries
from credit.errors import DataError

logger = logging.getLogger(__name__)

_DAY = 1440
# no file has this time
_NEVER = -(10**12)


@dataclass(frozen=True)
class TimeAggregation:
    """How the values of one variable come from those of its files: sums of values times weights.

    Attributes:
        times: (M,) int64 minutes, increasing, at which there is a value.
        terms: pairs of (M,) weights and (M,) places among the series' times; a weight of 0 is not read.
    """

    times: np.ndarray
    terms: Sequence[tuple[np.ndarray, np.ndarray]]

    def at(self, index: int) -> tuple[list[float], list[int]]:
        """Return the weights and places of what makes up a value."""
        found = [(float(weights[index]), int(places[index])) for weights, places in self.terms if weights[index]]
        return [weight for weight, _ in found], [place for _, place in found]


def build_windows(name: str, series: VariableSeries, conf: DataConfig, calendar: Calendar) -> TimeAggregation:
    """Return how a variable's values over ``data.timestep`` come from its files.

    Raises:
        DataError: where the intervals of the files do not make up the time step, or where an accumulation begins is not
            known.
    """
    temporal = conf.field(name).temporal
    whole = np.ones(len(series.times))
    if temporal == "instant":
        for piece in series.pieces:
            methods = piece.layout.attributes.get("cell_methods", "")
            if "time: mean" in methods or "time: sum" in methods:
                logger.warning(
                    '%s is taken as instantaneous; its cell_methods say "%s" (data.variable_options)', name, methods
                )
                break
        return TimeAggregation(series.times, [(whole, np.arange(len(series.times)))])
    begins = _begins(name, series, calendar)
    if temporal == "deaccumulate":
        return _running(name, series, conf, begins)
    return _pieces(name, series, conf, calendar, begins)


def _begins(name: str, series: VariableSeries, calendar: Calendar) -> np.ndarray | None:
    """Return (N,) minutes at which the intervals of the values begin, where the files have time bounds.

    Raises:
        DataError: for an interval that does not end at its label.
    """
    bounds = [piece.layout.window_bounds for piece in series.pieces]
    if any(one is None for one in bounds):
        return None
    each = np.stack([bounds[piece][place] for piece, place in zip(series.piece, series.position, strict=True)])
    wrong = np.flatnonzero(each[:, 1] != series.times)
    if len(wrong):
        begin, end, label = (calendar.format(minutes) for minutes in (*each[wrong[0]], series.times[wrong[0]]))
        raise DataError(
            f"{series.pieces[series.piece[wrong[0]]].path}: the value of {name} at {label} covers {begin} to {end}; a "
            "mean or an accumulation must carry the label of its end: shift the time axis"
        )
    return each[:, 0]


def _pieces(
    name: str, series: VariableSeries, conf: DataConfig, calendar: Calendar, begins: np.ndarray | None
) -> TimeAggregation:
    """Put windows of a time step together from one or more intervals, all of one length."""
    step, times = conf.step_minutes, series.times
    if begins is None:
        _require_one_spacing(name, series)
    lengths = np.unique(np.diff(times) if begins is None else times - begins)
    length = int(lengths[0]) if len(lengths) else step
    path = series.pieces[0].path
    rule = (
        f"data.variable_options.{name}.temporal is {conf.field(name).temporal}, so its values must make up "
        "data.timestep"
    )
    if begins is not None and len(lengths) > 1:
        spans = " and ".join(format_duration(int(one)) for one in lengths[:2])
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
        what = "averages" if conf.field(name).temporal == "mean" else "sums"
        logger.info("%s: %s of %d intervals of %s", name, what, count, format_duration(length))
    weight = 1.0 / count if conf.field(name).temporal == "mean" else 1.0
    return _complete(name, series, [(np.full(len(times), weight), times - number * length) for number in range(count)])


def _require_one_spacing(name: str, series: VariableSeries) -> None:
    """Refuse sources whose values cover intervals of other lengths, where only the distance of the times tells them.

    Raises:
        DataError: naming two sources.
    """
    sources = np.array([piece.source for piece in series.pieces])[series.piece]
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


def _running(name: str, series: VariableSeries, conf: DataConfig, begins: np.ndarray | None) -> TimeAggregation:
    """Take differences of values that run from the start of a forecast."""
    times, restarts = series.times, conf.field(name).restarts
    if begins is None:
        if restarts is None:
            raise DataError(
                f"{series.pieces[0].path}: data.variable_options.{name}.temporal is deaccumulate, but neither time "
                "bounds nor "
                f"data.variable_options.{name}.restarts say where an accumulation begins; name the hours (UTC), such "
                "as [0, 12]"
            )
        begins = _last_restart(times, restarts)
    begin_of = dict(zip(times.tolist(), begins.tolist(), strict=True))
    terms: list[list[tuple[float, int]]] = []
    for time in times.tolist():
        terms.append([])
        end, first = time, time - conf.step_minutes
        while end > first:
            # a time without a value makes this one incomplete
            begin = begin_of.get(end, first)
            if begin >= end:  # the zero at a forecast's start; what ended there is in no file
                terms[-1].append((1.0, _NEVER))
                break
            terms[-1].append((1.0, end))
            if begin < first:
                terms[-1].append((-1.0, first))
            end = max(begin, first)
    most = max(map(len, terms))
    padded = [[*own, *[(0.0, time)] * (most - len(own))] for own, time in zip(terms, times.tolist(), strict=True)]
    table = np.array(padded)
    return _complete(name, series, [(table[:, k, 0], table[:, k, 1].astype(np.int64)) for k in range(most)])


def _last_restart(times: np.ndarray, hours: Sequence[int]) -> np.ndarray:
    """Return the last restart before each time, minutes; a value at a restart belongs to what ends there."""
    candidates = [(times - 1 - hour * 60) // _DAY * _DAY + hour * 60 for hour in hours]
    return np.max(candidates, axis=0)


def _complete(name: str, series: VariableSeries, terms: Sequence[tuple[np.ndarray, np.ndarray]]) -> TimeAggregation:
    """Return the windows of which every part is there; `terms` are weights and times."""
    times = series.times
    there = np.all([np.isin(needed, times) for _, needed in terms], axis=0)
    if not there.any():
        raise DataError(
            f"{series.pieces[0].path}: {name} has {len(times)} times, which make up no whole window of data.timestep; "
            "add the times that are missing, or lengthen the period"
        )
    return TimeAggregation(times[there], [(w[there], np.searchsorted(times, needed[there])) for w, needed in terms])
