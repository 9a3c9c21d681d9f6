"""Checks that ``verification.other_forecasts`` can be read and scored together with the forecasts of the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar
from credit.cli.check.data import DataSummary
from credit.cli.check.report import CheckReport
from credit.config import Config
from credit.errors import DataError
from credit.forecast.io.forecast_reader import ForecastArchive, open_other_forecasts
from credit.verify.cases import common_cases, common_leads, describe_origin, missing_channels, require_comparable


@dataclass(frozen=True)
class PlannedForecasts:
    """Description of the forecasts that the run will make.

    The class has the attributes of a `ForecastSource` that the functions of `credit.verify.cases` read.

    Attributes:
        origin: name of the forecasts in messages.
        initial_minutes: (N,) initial times in minutes of the calendar, int64; empty if they are not known.
        lead_minutes: (L,) lead times in minutes, int64.
        channel_names: names of the channels that the run will write.
        calendar: calendar of the initial times.
    """

    origin: str
    initial_minutes: np.ndarray
    lead_minutes: np.ndarray
    channel_names: list[str]
    calendar: Calendar


def open_other_archives(config: Config, report: CheckReport) -> dict[str, ForecastArchive]:
    """Return name -> archive of each of the other forecasts; report an error for each archive that cannot be opened."""
    opened = {}
    for name, other in config.verification.other_forecasts.items():
        with report.collect():
            opened[name] = open_other_forecasts(name, other, config.data.level_units)
    return opened


def check_other_forecasts(config: Config, data: DataSummary, planned: PlannedForecasts, report: CheckReport) -> None:
    """Check that the other forecasts can be scored, and report how many initial and lead times all forecasts have.

    Args:
        config: config of the run.
        data: summary of the data that the forecasts are scored against.
        planned: forecasts of the run.
        report: receives errors and notes.
    """
    # Forecasts without an error so far. Only their times are compared.
    comparable: dict[str, PlannedForecasts | ForecastArchive] = {"model": planned}
    for name, archive in open_other_archives(config, report).items():
        num_errors_before = len(report.messages)
        with report.collect():
            require_comparable(name, archive, data, config.verification.grid is not None)
        with report.collect():
            lacking = missing_channels(name, archive, data, planned.channel_names)
            if lacking and len(report.messages) == num_errors_before:
                report.add_note(
                    f"verification.other_forecasts.{name}: no scores of {', '.join(lacking)}, "
                    "which these forecasts do not contain"
                )
        leads, cases = _find_common_times({"model": planned, name: archive}, data, report)
        # Read the first forecast that would be scored, to find missing values and damaged files.
        if len(leads) and len(cases):
            with report.collect():
                _require_complete_forecast(name, archive, data, int(cases[0]), int(leads[0]))
        if len(report.messages) == num_errors_before:
            comparable[name] = archive
    if len(comparable) > 1:
        leads, cases = _find_common_times(comparable, data, report)
        names = ", ".join(name for name in comparable if name != "model")
        report.add_note(
            f"verification.other_forecasts: {names}: scored are what all forecasts have, "
            f"initial times: {len(cases) or 'not known'}, lead times: {len(leads)}"
        )


def _find_common_times(
    archives: dict[str, PlannedForecasts | ForecastArchive], data: DataSummary, report: CheckReport
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lead times and the initial times that are in all archives.

    Args:
        archives: forecast name -> forecasts; ``model`` is the name of the run's forecasts.
        data: summary of the data that the forecasts are scored against.
        report: receives an error if no lead time or no initial time is common.

    Returns:
        (L,) lead times and (N,) initial times, int64 minutes. If no time is common, the array is empty and an error is
        reported. The initial times are also empty if the initial times of the run are not known.
    """
    leads = np.empty(0, dtype=np.int64)
    cases = np.empty(0, dtype=np.int64)
    with report.collect():
        leads = common_leads(archives)
    if len(archives["model"].initial_minutes):
        # If there are no common lead times (a separate error), compare the initial times for lead time 0.
        required_leads = leads if len(leads) else np.array([0])
        with report.collect():
            cases = common_cases(archives, data, required_leads, data.splits["test"])
    return leads, cases


def _require_complete_forecast(name: str, archive: ForecastArchive, data: DataSummary, initial: int, lead: int) -> None:
    """Raise a DataError unless one lead time of a forecast can be read and has values in all cells that are not masked.

    The values are checked only if the forecast is on the grid of the data.

    Args:
        name: name of the forecasts in the config.
        archive: the forecasts.
        data: summary of the data, with their grid and masks.
        initial: initial time in minutes.
        lead: lead time in minutes.

    Raises:
        DataError: if the forecast cannot be read, or values are missing where the data have values.
    """
    lead_index = archive.lead_minutes.tolist().index(lead)
    values = archive.read_members(initial, lead_index)
    # Masks can be compared only if both grids are equal.
    if data.reader is None or data.grid.describe_mismatch(archive.grid):
        return
    incomplete_channels = []
    for channel in data.channels.output:
        if channel.name not in archive.channel_names:
            continue
        values_MHW = values[:, archive.channel_names.index(channel.name)]
        no_mask = np.zeros(values_MHW.shape[-2:], dtype=bool)
        mask_HW = data.masks.get(channel.variable, no_mask)
        if not np.isfinite(values_MHW[..., ~mask_HW]).all():
            incomplete_channels.append(channel.name)
    if incomplete_channels:
        names = ", ".join(incomplete_channels)
        raise DataError(
            f"{describe_origin(name, archive)}: forecast from {archive.calendar.format(initial)} at {lead / 60:g} h: "
            f"{names} not finite where the data have values, which cannot be scored; copy it again, or take these "
            "variables out of it"
        )
