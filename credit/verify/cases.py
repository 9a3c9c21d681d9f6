"""Select the lead times and initial times that are scored, and check that forecasts and truth are comparable.

Shapes: N initial times (cases), L lead times. All times are in minutes.
"""

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
from credit.forecast.initial_times import list_output_leads
from credit.forecast.io.schema import SEEN_PERIODS
from credit.parallel.object_collectives import current_rank

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

logger = logging.getLogger(__name__)

# These two calendars are equal for all dates after 1582.
_GREGORIAN_CALENDARS = {"standard", "proleptic_gregorian"}


def describe_origin(name: str, archive: ForecastSource) -> str:
    """Return the path of forecasts for messages; for forecasts other than ``model``, add their config key before it."""
    if name == "model":
        return str(archive.origin)
    return f"verification.other_forecasts.{name}: {archive.origin}"


def seen_periods(archive: ForecastSource) -> list[tuple[str, str]]:
    """Return the periods on which the weights of a forecast were trained or selected, as (first date, last date).

    The list is empty if the forecast files do not record these periods.
    """
    periods = []
    # The attribute is written as 2000-01-01/2009-12-31, 2010-01-01/2010-12-31.
    for text in str(archive.attributes.get(SEEN_PERIODS, "")).split(", "):
        first, slash, last = text.partition("/")
        if slash:
            periods.append((first, last))
    return periods


def describe_seen_periods(archives: Mapping[str, ForecastSource], test: Split, calendar: Calendar) -> str:
    """Return a message that names the forecasts whose weights were trained or selected on a part of the test period.

    Args:
        archives: forecast name -> source of the forecasts.
        test: the test period.
        calendar: calendar of the test period.

    Returns:
        The message; "" if there is no such forecast.
    """
    overlaps = []
    for name, archive in archives.items():
        period = find_overlap(test, seen_periods(archive), calendar)
        if period:
            overlaps.append(f"{name} on {' to '.join(period)}")
    if not overlaps:
        return ""
    return f"Trained or selected on a part of the test period: {', '.join(overlaps)}"


def select_common_cases(
    archives: Mapping[str, ForecastSource],
    reader: FieldReader,
    is_regridded: bool,
    test: Split,
    allow_seen: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lead times and initial times to score; all forecasts have them, and the data contain their truth.

    Args:
        archives: forecast name -> source of the forecasts; the forecasts of the run have the name ``model``.
        reader: reader of the truth.
        is_regridded: True if all forecasts and the truth are regridded to one grid.
        test: the test period.
        allow_seen: True to accept forecasts whose weights were trained or selected on a part of the test period; False
            to raise an error for such forecasts.

    Returns:
        Lead times (L,) and initial times (N,), both in minutes, int64 and increasing.

    Raises:
        DataError: if the forecasts cannot be scored together; the message lists all reasons.
    """
    errors = ErrorCollector()
    missing = {}
    # Without common lead times, the cases are checked with lead time 0, so only for truth at the initial time.
    leads = np.zeros(1, dtype=np.int64)
    cases = np.empty(0, dtype=np.int64)
    # All problems of all forecasts are collected, so that a single error message lists them.
    for name, archive in archives.items():
        with errors.collect():
            require_comparable(name, archive, reader, is_regridded)
        with errors.collect():
            if not allow_seen:
                require_no_leakage(test, seen_periods(archive), describe_origin(name, archive), reader.calendar)
        with errors.collect():
            missing[name] = missing_channels(name, archive, reader, archives["model"].channel_names)
    with errors.collect():
        leads = common_leads(archives)
    with errors.collect():
        cases = common_cases(archives, reader, leads, test)
    errors.raise_any()
    # Log how many initial and lead times of the run remain, because all forecasts must have them.
    if current_rank() == 0:
        model = archives["model"]
        for name in archives:
            if name == "model":
                continue
            missing_note = ""
            if missing[name]:
                missing_note = f"; it does not have {', '.join(missing[name])}, so these have no scores"
            logger.info(
                "%s: %d of the model's %d initial times and %d of its %d lead times are scored, because all forecasts "
                "have them%s",
                name, len(cases), len(model.initial_minutes), len(leads), len(model.lead_minutes),
                missing_note,
            )  # fmt: skip
    return leads, cases


def describe_unscored(
    config: Config, archive: ForecastSource, reader: FieldReader, leads: np.ndarray, test: Split
) -> tuple[str, list[str]]:
    """Return messages about requested lead times, parts of the test period and forecasts that have no scores.

    Args:
        config: config of the run.
        archive: forecasts of the run; lead times that were added to the config later may be missing in them.
        reader: reader of the truth.
        leads: (L,) scored lead times in minutes.
        test: the test period.

    Returns:
        (message about missing lead times, list of messages about missing data). The first item names the lead times of
        the config section ``inference`` that are missing in the forecasts; "" if none is missing. The list has a
        message if the data do not cover the complete test period, and a message if some forecasts have no truth.
    """
    # Gaps of the data in the test period, and forecasts without truth.
    gaps = []
    period = test.describe(reader.calendar)
    coverage = describe_coverage(reader.times, test, reader.calendar, config.data.step_minutes)
    if coverage:
        gaps.append(f"{period}: {coverage}")
    initial_times = archive.initial_minutes.tolist()
    num_scored = len(cases_with_truth(set(initial_times), reader, leads, test))
    if num_scored < len(initial_times):
        gaps.append(
            f"{archive.origin}: {len(initial_times) - num_scored} of its initial times ({_describe_times(archive)}) "
            f"have no scores: the data have no truth in {period} at every lead time up to {leads[-1] / 60:g} h"
        )
    # Lead times that were requested after the forecasts had been made.
    requested_leads = list_output_leads(config.inference, config.data.step_minutes)
    missing_leads = np.setdiff1d(requested_leads, archive.lead_minutes)
    if not len(missing_leads):
        return "", gaps
    missing = (
        f"{len(missing_leads)} of {len(requested_leads)} lead times that inference requests (lead_time, output_every, "
        f"lead_times) are not in the forecasts and have no scores: {_describe_hours(missing_leads)}"
    )
    return missing, gaps


def missing_channels(
    name: str, archive: ForecastSource, reader: FieldReader, run_channels: Sequence[str]
) -> list[str]:  # fmt: skip
    """Return the names of the scored channels that are missing in a forecast.

    The scored channels are the output channels that the forecasts of the run contain.

    Args:
        name: name of the forecast.
        archive: source of the forecast.
        reader: reader of the truth.
        run_channels: names of the channels that the forecasts of the run contain.

    Raises:
        DataError: if the forecast has none of the scored channels although it has other output channels.
    """
    outputs = [channel.name for channel in reader.channels.output]
    scored = [channel for channel in outputs if channel in run_channels]
    missing = [channel for channel in scored if channel not in archive.channel_names]
    # For a forecast without any output channel, `require_comparable` raises an error with a better message.
    lacks_all_scored = bool(scored) and len(missing) == len(scored)
    has_other_outputs = bool({*outputs} & {*archive.channel_names})
    if lacks_all_scored and has_other_outputs:
        raise DataError(
            f"{describe_origin(name, archive)}: has none of the channels that the run writes ({', '.join(scored)}); "
            "write others (inference.variables, levels), or leave these forecasts out"
        )
    return missing


def require_comparable(name: str, archive: ForecastSource, reader: FieldReader, is_regridded: bool) -> None:
    """Raise a DataError if a forecast cannot be scored against the truth; the message lists all reasons.

    The forecast must have at least one output variable of the data, convertible units, and the calendar of the data. It
    must also have the grid of the data, unless forecasts and truth are regridded.

    Args:
        name: name of the forecast.
        archive: source of the forecast.
        reader: reader of the truth.
        is_regridded: True if forecasts and truth are regridded to one grid, so that their grids may differ.
    """
    errors = ErrorCollector()
    forecast = describe_origin(name, archive)

    # Variables, grid and calendar.
    outputs = reader.channels.output
    output_names = [channel.name for channel in outputs]
    if not {*output_names} & {*archive.channel_names}:
        errors.add(
            f"{forecast}: has none of the outputs of data.variables ({', '.join(output_names)}), but "
            f"{', '.join(archive.channel_names[:20])}; verification.other_forecasts.NAME.rename gives its variables "
            "the names of the data"
        )
    difference = reader.grid.describe_mismatch(archive.grid)
    if difference and not is_regridded:
        errors.add(
            f"{forecast}: its grid is not the grid of the data: {difference}; set verification.grid to regrid both"
        )
    are_both_gregorian = {archive.calendar.name, reader.calendar.name} <= _GREGORIAN_CALENDARS
    if archive.calendar != reader.calendar and not are_both_gregorian:
        errors.add(
            f"{forecast}: calendar {archive.calendar.name}, the data have {reader.calendar.name}; only forecasts in "
            "the data's calendar can be scored"
        )

    # A variable without levels may have the same name as a channel on a level, such as z500.
    scored = [channel for channel in outputs if channel.name in archive.channel_names]
    for channel in scored:
        is_flat_in_forecast = channel.name in archive.names_without_levels
        is_flat_in_data = channel.level is None
        if is_flat_in_forecast == is_flat_in_data:
            continue
        flat = "a variable without levels"
        on_level = f"{channel.variable} on a level"
        in_forecast = flat if is_flat_in_forecast else on_level
        in_data = flat if is_flat_in_data else on_level
        errors.add(
            f"{forecast}: {channel.name} is {in_forecast} there and {in_data} in the data; have both among "
            "data.variables and what is written (inference.variables), or leave one out of both"
        )

    # Units of each variable.
    for variable in dict.fromkeys(channel.variable for channel in scored):
        units = reader.attributes.get(variable, {}).get("units")
        if units and archive.units.get(variable) is None:
            logger.warning("%s: %s has no units; the units of the data are assumed: %s", forecast, variable, units)
        with errors.collect():
            unit_conversion(name, archive, reader, variable)
    errors.raise_any()


def unit_conversion(name: str, archive: ForecastSource, reader: FieldReader, variable: str) -> Conversion | None:
    """Return the conversion of a variable of a forecast to the units of the data, None if no conversion is needed.

    No conversion is needed if forecast and data have the same units. If the units of the forecast or of the data are
    unknown, they are assumed to be the same.

    Args:
        name: name of the forecast, for messages.
        archive: source of the forecast.
        reader: reader of the data.
        variable: name of the variable in the data.

    Raises:
        DataError: if the units measure different quantities.
        ConfigError: if the conversion needs the package cf-units and it is not installed.
    """
    data_units = reader.attributes.get(variable, {}).get("units", "").strip()
    forecast_units = archive.units.get(variable, "").strip()
    if not (data_units and forecast_units):
        return None
    target = f"the units of {variable} in the data"
    return find_conversion(forecast_units, data_units, variable, describe_origin(name, archive), target)


def common_leads(archives: Mapping[str, ForecastSource]) -> np.ndarray:
    """Return the lead times above 0 that all forecasts have, in minutes: (L,) int64, increasing.

    Args:
        archives: forecast name -> source of the forecasts.

    Raises:
        DataError: if the forecasts have no lead time above 0 in common.
    """
    all_leads = [set(archive.lead_minutes.tolist()) for archive in archives.values()]
    common = set.intersection(*all_leads)
    # Lead time 0 is the analysis itself.
    leads = np.array(sorted(lead for lead in common if lead > 0), dtype=np.int64)
    if not len(leads):
        available = []
        for name, archive in archives.items():
            available.append(f"{describe_origin(name, archive)} has {_describe_hours(archive.lead_minutes)}")
        raise DataError(
            f"{'; '.join(available)}: there is no lead time in common; make all forecasts to at least one equal lead "
            "time (inference.lead_time, output_every, lead_times)"
        )
    return leads


def common_cases(
    archives: Mapping[str, ForecastSource], reader: FieldReader, leads: np.ndarray, test: Split
) -> np.ndarray:
    """Return the initial times that all forecasts have and for which the test period contains truth.

    The truth is needed at the initial time and at the valid time of every lead time.

    Args:
        archives: forecast name -> source of the forecasts.
        reader: reader of the truth.
        leads: (L,) lead times in minutes.
        test: the test period.

    Returns:
        (N,) int64 minutes, increasing, N >= 1.

    Raises:
        DataError: if there is no such initial time.
    """
    # If there is no case, the message lists the initial times of each forecast, or the period of the truth.
    all_initial_times = [set(archive.initial_minutes.tolist()) for archive in archives.values()]
    common = set.intersection(*all_initial_times)
    if not common:
        available = []
        for name, archive in archives.items():
            available.append(f"{describe_origin(name, archive)} has {_describe_times(archive)}")
        raise DataError(
            f"{'; '.join(available)}: there is no initial time in common; make all forecasts from at least one equal "
            "initial time (inference.initial_times)"
        )
    cases = cases_with_truth(common, reader, leads, test)
    if not len(cases):
        raise DataError(
            f"{test.describe(reader.calendar)}: of {len(common)} initial times that all forecasts have, none has truth "
            f"at every lead up to {leads[-1] / 60:g} h in this period; {describe_span(reader.times, reader.calendar)}; "
            "forecast from times in both (inference.initial_times), or choose another data.splits.test"
        )
    return cases


def cases_with_truth(initial_times: set[int], reader: FieldReader, leads: np.ndarray, test: Split) -> np.ndarray:
    """Return the initial times for which the test period contains truth at the initial time and at every valid time.

    Args:
        initial_times: initial times in minutes.
        reader: reader of the truth.
        leads: (L,) lead times in minutes.
        test: the test period.

    Returns:
        (N,) int64 minutes, increasing.
    """
    is_in_test = (reader.times >= test.first) & (reader.times <= test.last)
    truth_times = set(reader.times[is_in_test].tolist())
    cases = []
    for initial in sorted(initial_times):
        # The baselines start from the truth at the initial time.
        required_times = {initial, *(initial + leads).tolist()}
        if required_times <= truth_times:
            cases.append(initial)
    return np.array(cases, dtype=np.int64)


def _describe_hours(minutes: np.ndarray) -> str:
    """Return lead times (in minutes) as a string in hours; list only the first three and the last of six or more."""
    hours = [f"{lead / 60:g}" for lead in minutes.tolist()]
    if len(hours) >= 6:
        hours = [*hours[:3], "...", hours[-1]]
    return f"{', '.join(hours)} h"


def _describe_times(archive: ForecastSource) -> str:
    """Return a phrase with the number of initial times of a forecast source, and the first and last initial time."""
    first = archive.calendar.format(archive.initial_minutes[0])
    last = archive.calendar.format(archive.initial_minutes[-1])
    return f"{len(archive.initial_minutes)}, {first} to {last}"
