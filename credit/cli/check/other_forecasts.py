"""Checks of ``verification.other_forecasts``: whether they can be scored beside the forecasts of the run."""

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
    """Forecasts of the run before they exist, with the attributes of `ForecastSource` that `credit.verify.cases` reads.

    Attributes:
        origin: what messages call them.
        initial_minutes: initial times, empty where they are not known.
        lead_minutes: lead times.
        channel_names: what is written.
        calendar: the calendar.
    """

    origin: str
    initial_minutes: np.ndarray
    lead_minutes: np.ndarray
    channel_names: list[str]
    calendar: Calendar


def open_other_archives(config: Config, report: CheckReport) -> dict[str, ForecastArchive]:
    """Return name -> the other forecasts that can be opened."""
    opened = {}
    for name, other in config.verification.other_forecasts.items():
        with report.collect():
            opened[name] = open_other_forecasts(name, other, config.data.level_units)
    return opened


def check_other_forecasts(config: Config, data: DataSummary, planned: PlannedForecasts, report: CheckReport) -> None:
    """Check whether the other forecasts can be scored, and report how many initial and lead times are common."""
    fitting: dict[str, PlannedForecasts | ForecastArchive] = {"model": planned}
    for name, archive in open_other_archives(config, report).items():
        before = len(report.messages)
        with report.collect():
            require_comparable(name, archive, data, config.verification.grid is not None)
        with report.collect():
            lacking = missing_channels(name, archive, data, planned.channel_names)
            if lacking and len(report.messages) == before:
                report.add_note(
                    f"verification.other_forecasts.{name}: no scores of {', '.join(lacking)}, which it does not have"
                )
        leads, cases = _compare_times({"model": planned, name: archive}, data, report)
        if len(leads) and len(cases):
            with report.collect():
                _read_forecast(name, archive, data, int(cases[0]), int(leads[0]))
        if len(report.messages) == before:
            fitting[name] = archive
    if len(fitting) > 1:
        leads, cases = _compare_times(fitting, data, report)
        report.add_note(
            f"verification.other_forecasts: {', '.join(list(fitting)[1:])}: scored are what all forecasts have, "
            f"initial times: {len(cases) or 'not known'}, lead times: {len(leads)}"
        )


def _compare_times(
    archives: dict[str, PlannedForecasts | ForecastArchive], data: DataSummary, report: CheckReport
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lead times and the initial times that are scored, none of those that are not known."""
    leads, cases = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    with report.collect():
        leads = common_leads(archives)
    if len(archives["model"].initial_minutes):
        with report.collect():
            cases = common_cases(archives, data, leads if len(leads) else np.array([0]), data.splits["test"])
    return leads, cases


def _read_forecast(name: str, archive: ForecastArchive, data: DataSummary, initial: int, lead: int) -> None:
    """Read one lead time of one forecast; where it lies on the data's grid nothing but masked cells may be missing."""
    values = archive.read_members(initial, archive.lead_minutes.tolist().index(lead))
    if data.reader is None or data.grid.describe_mismatch(archive.grid):
        return
    missing = []
    for channel in data.channels.output:
        if channel.name in archive.channel_names:
            channel_values = values[:, archive.channel_names.index(channel.name)]
            hidden = data.masks.get(channel.variable, np.zeros(channel_values.shape[-2:], dtype=bool))
            if not np.isfinite(channel_values[..., ~hidden]).all():
                missing.append(channel.name)
    if missing:
        raise DataError(
            f"{describe_origin(name, archive)}: forecast from {archive.calendar.format(initial)} at {lead / 60:g} h: "
            f"{', '.join(missing)} not finite where the data have values, which cannot be scored; copy it again, or "
            "take these variables out of it"
        )
