"""The part of ``credit_check`` that compares ``verification.other_forecasts`` with what the verification will want."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.calendar import Calendar
from credit.cli.check.data import DataSummary
from credit.cli.check.report import CheckReport
from credit.config import Config
from credit.errors import DataError
from credit.forecast.io.forecast_reader import ForecastArchive, open_other_forecasts
from credit.verify.cases import common_cases, common_leads, forecast_label, missing_channels, require_comparable


@dataclass(frozen=True)
class Planned:
    """The run's own forecasts before they are made; has what `credit.verify.cases` asks of `ForecastSource`.

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


def open_others(config: Config, findings: CheckReport) -> dict[str, ForecastArchive]:
    """Return name -> the other forecasts that can be opened."""
    opened = {}
    for name, other in config.verification.other_forecasts.items():
        with findings.collect():
            opened[name] = open_other_forecasts(name, other, config.data.level_units)
    return opened


def check_other_forecasts(config: Config, found: DataSummary, planned: Planned, findings: CheckReport) -> None:
    """See whether the other forecasts can be scored beside the run's own, and how much of them."""
    fitting: dict[str, Planned | ForecastArchive] = {"model": planned}
    for name, archive in open_others(config, findings).items():
        before = len(findings.messages)
        with findings.collect():
            require_comparable(name, archive, found, config.verification.grid is not None)
        with findings.collect():
            lacking = missing_channels(name, archive, found, planned.channel_names)
            if lacking and len(findings.messages) == before:
                findings.say(
                    f"verification.other_forecasts.{name}: no scores of {', '.join(lacking)}, which it does not have"
                )
        leads, cases = _compare_times({"model": planned, name: archive}, found, findings)
        if len(leads) and len(cases):
            with findings.collect():
                _read_one(name, archive, found, int(cases[0]), int(leads[0]))
        if len(findings.messages) == before:
            fitting[name] = archive
    if len(fitting) > 1:
        leads, cases = _compare_times(fitting, found, findings)
        findings.say(
            f"verification.other_forecasts: {', '.join(list(fitting)[1:])}: scored are what all forecasts have, "
            f"initial times: {len(cases) or 'not known'}, lead times: {len(leads)}"
        )


def _compare_times(
    archives: dict[str, Planned | ForecastArchive], found: DataSummary, findings: CheckReport
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lead times and the initial times that are scored, none of those that are not known."""
    leads, cases = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    with findings.collect():
        leads = common_leads(archives)
    if len(archives["model"].initial_minutes):
        with findings.collect():
            cases = common_cases(archives, found, leads if len(leads) else np.array([0]), found.splits["test"])
    return leads, cases


def _read_one(name: str, archive: ForecastArchive, found: DataSummary, initial: int, lead: int) -> None:
    """Read one lead time of one forecast; where it lies on the data's grid nothing but masked cells may be missing."""
    values = archive.read_members(initial, archive.lead_minutes.tolist().index(lead))
    if found.reader is None or found.grid.describe_mismatch(archive.grid):
        return
    missing = []
    for channel in found.channels.output:
        if channel.name in archive.channel_names:
            own = values[:, archive.channel_names.index(channel.name)]
            hidden = found.masks.get(channel.variable, np.zeros(own.shape[-2:], dtype=bool))
            missing += [channel.name] if not np.isfinite(own[..., ~hidden]).all() else []
    if missing:
        raise DataError(
            f"{forecast_label(name, archive)}: forecast from {archive.calendar.format(initial)} at {lead / 60:g} h: "
            f"{', '.join(missing)} not finite where the data have values, which cannot be scored; copy it again, or "
            "take these variables out of it"
        )
