"""Which forecasts, lead times and initial times are scored together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from credit.calendar import Calendar
from credit.config import Config
from credit.data.error_collector import ErrorCollector
from credit.data.formats.units import Conversion, find_conversion
from credit.data.splits import Split, describe_coverage, describe_span, find_overlap, require_no_leakage
from credit.errors import DataError
from credit.forecast.forecast_source import ForecastSource
from credit.forecast.initial_times import choose_leads
from credit.forecast.io.schema import SEEN
from credit.parallel.object_collectives import rank_of

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

logger = logging.getLogger(__name__)

_REAL_CALENDARS = {"standard", "proleptic_gregorian"}  # the same since 1582


def call(name: str, archive: ForecastSource) -> str:
    """Return what errors call a forecast: the key of another one, and where it is."""
    return str(archive.origin) if name == "model" else f"verification.other_forecasts.{name}: {archive.origin}"


def seen_periods(archive: ForecastSource) -> list[tuple[str, str]]:
    """Return (first, last) of the periods that a forecast's weights were trained or selected on, as far as it tells."""
    told = [period.partition("/") for period in str(archive.attributes.get(SEEN, "")).split(", ")]
    return [(first, last) for first, slash, last in told if slash]


def describe_seen(archives: Mapping[str, ForecastSource], test: Split, calendar: Calendar) -> str:
    """Return in words which forecasts have seen a part of the test period; nothing where none has."""
    found = {name: find_overlap(test, seen_periods(own), calendar) for name, own in archives.items()}
    told = [f"{name} on {' to '.join(period)}" for name, period in found.items() if period]
    return f"Trained or selected on a part of the test period: {', '.join(told)}" if told else ""


def agree(
    archives: Mapping[str, ForecastSource], reader: FieldReader, regridded: bool, test: Split, allow_seen: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lead times and the initial times that are scored, and log what each other forecast has of them.

    Args:
        archives: name -> forecasts, the run's own as ``model``.
        reader: the data.
        regridded: whether all are brought to one grid.
        test: the test period.
        allow_seen: whether forecasts may have seen a part of it.

    Raises:
        DataError: with everything that keeps the forecasts from being scored together.
    """
    problems, lacking = ErrorCollector(), {}
    leads, cases = np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64)
    for name, own in archives.items():
        with problems.collect():
            require_comparable(name, own, reader, regridded)
        with problems.collect():
            require_no_leakage(test, [] if allow_seen else seen_periods(own), call(name, own), reader.calendar)
        with problems.collect():
            lacking[name] = lacking_channels(name, own, reader, archives["model"].channel_names)
    with problems.collect():
        leads = common_leads(archives)
    with problems.collect():
        cases = common_cases(archives, reader, leads, test)
    problems.raise_any()
    for name in [name for name in archives if name != "model" and rank_of() == 0]:
        logger.info(
            "%s: scored are %d of the model's %d initial times and %d of its %d lead times, which all forecasts have%s",
            name, len(cases), len(archives["model"].initial_minutes), len(leads), len(archives["model"].lead_minutes),
            f"; no scores of {', '.join(lacking[name])}, which it does not have" if lacking[name] else "",
        )  # fmt: skip
    return leads, cases


def find_unscored(
    config: Config, archive: ForecastSource, reader: FieldReader, leads: np.ndarray, test: Split
) -> tuple[str, list[str]]:
    """Return in words what was asked for and has no scores.

    Args:
        config: of the run.
        archive: the run's forecasts, of which some may be still to come.
        reader: the data.
        leads: lead times that are scored, minutes.
        test: the test period.

    Returns:
        The lead times of ``inference`` that the forecasts do not have, nothing where they have all; and a line for each
        thing that the data lack: a part of the test period, truth of some of the forecasts.
    """
    step, lines = config.data.step_minutes, []
    period, initial = test.describe(reader.calendar), archive.initial_minutes.tolist()
    cover = describe_coverage(reader.times, test, reader.calendar, step)
    if cover:
        lines.append(f"{period}: {cover}")
    whole = len(cases_with_truth({*initial}, reader, leads, test))
    if whole < len(initial):
        lines.append(
            f"{archive.origin}: {len(initial) - whole} of its initial times ({_some_times(archive)}) have no scores: "
            f"the data have no truth in {period} at every lead time up to {leads[-1] / 60:g} h"
        )
    asked = choose_leads(config.inference, step)
    lacking = np.setdiff1d(asked, archive.lead_minutes)
    if not len(lacking):
        return "", lines
    keys = "lead_time, output_every, lead_times"
    return (
        f"{len(lacking)} of {len(asked)} lead times that inference asks for ({keys}) are not in the forecasts and have "
        f"no scores: {_some_hours(lacking)}"
    ), lines


def lacking_channels(name: str, archive: ForecastSource, reader: FieldReader, written: Sequence[str]) -> list[str]:
    """Return the channels that the run has `written` and a forecast lacks.

    Raises:
        DataError: if these are all of them although it has others of the outputs.
    """
    outputs = [channel.name for channel in reader.channels.output]
    scored = [channel for channel in outputs if channel in written]
    lacking = [channel for channel in scored if channel not in archive.channel_names]
    if scored and len(lacking) == len(scored) and {*outputs} & {*archive.channel_names}:
        raise DataError(
            f"{call(name, archive)}: has none of the channels that the run writes ({', '.join(scored)}); write others "
            "(inference.variables, levels), or leave these forecasts out"
        )
    return lacking


def require_comparable(name: str, archive: ForecastSource, reader: FieldReader, regridded: bool) -> None:
    """Refuse forecasts of other variables, of another calendar, in units that cannot be converted to the data's or,
    unless all are `regridded`, on another grid.

    Raises:
        DataError: with everything that does not fit.
    """
    problems, where, outputs = ErrorCollector(), call(name, archive), reader.channels.output
    if not {channel.name for channel in outputs} & {*archive.channel_names}:
        problems.add(
            f"{where}: has none of the outputs of data.variables ({', '.join(channel.name for channel in outputs)}), "
            f"but {', '.join(archive.channel_names[:20])}; what others call by another name is renamed by "
            "verification.other_forecasts.NAME.rename"
        )
    difference = reader.grid.describe_mismatch(archive.grid)
    if difference and not regridded:
        problems.add(f"{where}: its grid is not that of the data: {difference}; verification.grid brings both to one")
    if archive.calendar != reader.calendar and not {archive.calendar.name, reader.calendar.name} <= _REAL_CALENDARS:
        problems.add(
            f"{where}: calendar {archive.calendar.name}, the data have {reader.calendar.name}; only forecasts in the "
            "data's calendar can be scored"
        )
    scored = [channel for channel in outputs if channel.name in archive.channel_names]
    for channel in scored:
        if (channel.level is None) != (channel.name in archive.flat_names):
            what = "a variable without levels", f"{channel.variable} on a level"
            theirs, ours = what if channel.level is not None else what[::-1]
            problems.add(
                f"{where}: {channel.name} is {theirs} there and {ours} in the data; have both among data.variables and "
                "what is written (inference.variables), or leave one out of both"
            )
    for variable in dict.fromkeys(channel.variable for channel in scored):
        ours = reader.attributes.get(variable, {}).get("units")
        if ours and archive.units.get(variable) is None:
            logger.warning("%s: %s has no units and is taken to be in %s, as the data", where, variable, ours)
        with problems.collect():
            conversion_of(name, archive, reader, variable)
    problems.raise_any()


def conversion_of(name: str, archive: ForecastSource, reader: FieldReader, variable: str) -> Conversion | None:
    """Return the conversion of a variable of a forecast to the units of the data, None where nothing changes.

    Raises:
        DataError: if the units measure different quantities.
        ConfigError: if cf-units is needed and not installed.
    """
    ours, theirs = (units.strip() for units in (reader.attributes.get(variable, {}).get("units", ""),
                                                archive.units.get(variable, "")))  # fmt: skip
    key = f"the units of {variable} in the data"
    return find_conversion(theirs, ours, variable, call(name, archive), key) if ours and theirs else None


def common_leads(archives: Mapping[str, ForecastSource]) -> np.ndarray:
    """Return the lead times that every archive has, without 0."""
    common = set.intersection(*(set(own.lead_minutes.tolist()) for own in archives.values()))
    leads = np.array(sorted(lead for lead in common if lead > 0), dtype=np.int64)
    if not len(leads):
        have = (f"{call(name, own)} has {_some_hours(own.lead_minutes)}" for name, own in archives.items())
        raise DataError(
            f"{'; '.join(have)}: there is no lead time in common; forecast to some of them (inference.lead_time, "
            "output_every, lead_times)"
        )
    return leads


def common_cases(
    archives: Mapping[str, ForecastSource], reader: FieldReader, leads: np.ndarray, test: Split
) -> np.ndarray:
    """Return the initial times that every archive has and whose truth, at every lead too, is in the test period.

    Raises:
        DataError: if there is none.
    """
    common = set.intersection(*(set(own.initial_minutes.tolist()) for own in archives.values()))
    if not common:
        have = (f"{call(name, own)} has {_some_times(own)}" for name, own in archives.items())
        raise DataError(
            f"{'; '.join(have)}: there is no initial time in common; forecast from some of them "
            "(inference.initial_times)"
        )
    cases = cases_with_truth(common, reader, leads, test)
    if not len(cases):
        raise DataError(
            f"{test.describe(reader.calendar)}: of {len(common)} initial times that all forecasts have, none has truth "
            f"at every lead up to {leads[-1] / 60:g} h in this period; {describe_span(reader.times, reader.calendar)}; "
            "forecast from times in both (inference.initial_times), or choose another data.splits.test"
        )
    return cases


def cases_with_truth(initial: set[int], reader: FieldReader, leads: np.ndarray, test: Split) -> np.ndarray:
    """Return which initial times, increasing, have truth in the test period, at every lead too."""
    truth = set(reader.times[(reader.times >= test.first) & (reader.times <= test.last)].tolist())
    cases = sorted(t for t in initial if t in truth and all(t + lead in truth for lead in leads.tolist()))
    return np.array(cases, dtype=np.int64)


def _some_hours(minutes: np.ndarray) -> str:
    """Return lead times in words, the first few and the last."""
    hours = [f"{lead / 60:g}" for lead in minutes.tolist()]
    return f"{', '.join(hours if len(hours) < 6 else [*hours[:3], '...', hours[-1]])} h"


def _some_times(archive: ForecastSource) -> str:
    first, last = (archive.calendar.format(archive.initial_minutes[place]) for place in (0, -1))
    return f"{len(archive.initial_minutes)}, {first} to {last}"
