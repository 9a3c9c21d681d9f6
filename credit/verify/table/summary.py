"""Summary of a score table for the terminal and for scripts: global RMSE by channel and lead time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from credit.config.sections.verification import BASELINES, BEST_BASELINE
from credit.verify.table.table import ScoreTable

# Names of the headline channels in files of this package, ECMWF and WeatherBench 2.
_HEADLINE_NAMES = (
    ("z500", "geopotential500"),
    ("t850", "temperature850"),
    ("t2m", "2t", "2m_temperature"),
    ("u10", "10u", "10m_u_component_of_wind"),
    ("v10", "10v", "10m_v_component_of_wind"),
    ("msl", "mean_sea_level_pressure"),
    ("q700", "specific_humidity700"),
    ("tp", "total_precipitation", "total_precipitation_6hr", "total_precipitation_24hr"),
)
# Number of channels of the summary of a table that has no headline channel.
_MAX_OTHER_CHANNELS = 6

# Version of the document that `summary_document` returns; it is increased when a key changes its meaning.
DOCUMENT_VERSION = 1


@dataclass(frozen=True)
class SummaryRow:
    """Global RMSE of one channel at one lead time.

    Attributes:
        channel: name of the channel.
        units: units of the channel and of its RMSE.
        lead_hours: lead time in hours.
        rmse: forecast name -> RMSE; NaN if the forecast does not have the channel.
        ratio: RMSE of the model divided by the RMSE of the reference, dimensionless; NaN if one RMSE is missing.
        significant: True if model and reference differ significantly.
        n_eff: effective number of cases: the mean difference over `n_eff` independent cases would be equally uncertain.
            NaN if there are too few cases to estimate it.
    """

    channel: str
    units: str
    lead_hours: float
    rmse: dict[str, float]
    ratio: float
    significant: bool
    n_eff: float


def headline_channels(table: ScoreTable) -> list[str]:
    """Return the names of the headline channels of a table; without headline channels, its first six channels.

    Headline channels are z500, t850, t2m, both components of the 10 m wind, mean sea level pressure, q700 and
    precipitation.
    """
    # The channels have the order of `_HEADLINE_NAMES`, so that tables of different runs have the same order.
    channels = []
    for names in _HEADLINE_NAMES:
        channels += [name for name in names if name in table.channels]
    return channels or table.channels[:_MAX_OTHER_CHANNELS]


def summary_forecasts(reference: str | None) -> tuple[str, ...]:
    """Return the names of the forecasts of a summary: the model, and the reference or (if None) all baselines."""
    if reference is None:
        return ("model", *BASELINES)
    return ("model", reference)


def summarize(
    table: ScoreTable, channels: Sequence[str], leads: Sequence[float], reference: str | None = None
) -> list[SummaryRow]:
    """Return the rows of a summary, one row for each channel and lead time, ordered by channel.

    Args:
        table: the scores.
        channels: names of the channels.
        leads: lead times in hours.
        reference: name of the other forecast with which the model is compared; None for the best of the baselines.

    Raises:
        ValueError: if one of the channels or lead times, or the reference, is missing in the table.
    """
    # The comparison of a channel has a value for each lead time of the table; the summary shows some lead times.
    opponent = reference or BEST_BASELINE
    rows = []
    for channel in channels:
        difference = table.comparison("rmse_difference", channel, opponent)
        significant = table.comparison("significant", channel, opponent)
        n_eff = table.comparison("n_eff", channel, opponent)
        for hours in leads:
            index = table.lead_hours.index(hours)
            rmse = {}
            for name in summary_forecasts(reference):
                rmse[name] = table.score(name, channel, hours)
            # The table contains the relative difference, which is the ratio minus 1.
            row = SummaryRow(
                channel=channel,
                units=table.units(channel),
                lead_hours=hours,
                rmse=rmse,
                ratio=float(1 + difference[index]),
                significant=bool(significant[index]),
                n_eff=float(n_eff[index]),
            )
            rows.append(row)
    return rows


def summary_document(table: ScoreTable, reference: str | None, files: dict[str, str]) -> dict[str, Any]:
    """Return the summary of all channels and lead times in the form that `credit verify --json` prints.

    Args:
        table: the scores.
        reference: name of the other forecast with which the model is compared; None for the best of the baselines.
        files: kind of file, such as "report" -> path of the written file.
    """
    # JSON has no NaN, so missing scores are null.
    rows = []
    for row in summarize(table, table.channels, table.lead_hours, reference):
        rmse = {name: finite_or_none(value) for name, value in row.rmse.items()}
        rows.append(
            {
                "channel": row.channel,
                "units": row.units,
                "lead_hours": row.lead_hours,
                "rmse": rmse,
                "ratio": finite_or_none(row.ratio),
                "significant": row.significant,
                "n_eff": finite_or_none(row.n_eff),
            }
        )
    return {
        "version": DOCUMENT_VERSION,
        "metric": "rmse",
        "region": "global",
        "season": "all",
        "forecasts": {name: table.display_name(name) for name in summary_forecasts(reference)},
        "reference": reference or BEST_BASELINE,
        "n_cases": table.n_cases,
        "first_case": str(table.dataset.attrs["first_case"]),
        "last_case": str(table.dataset.attrs["last_case"]),
        "rows": rows,
        "warnings": table.warnings(),
        "files": files,
    }


def finite_or_none(value: float) -> float | None:
    """Return a number, or None if the number is not finite, because JSON has no such numbers."""
    if not math.isfinite(value):
        return None
    return value
