"""Published scores of other systems, shown only beside scores on the same grid and of the same whole years."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import yaml

from credit.calendar import Calendar
from credit.data.formats.units import plain
from credit.verify.table.table import ScoreTable

_UNITS = {"z500": "m2 s-2", "t850": "K", "t2m": "K"}
_SAME_GRID = 0.01  # relative
_LONGEST_GAP = 5 * 1440  # minutes between initial times: weather lasts about as long, so nothing of a year is missed


@dataclass(frozen=True)
class Published:
    """Scores of one system.

    Attributes:
        system: its name.
        source: where the numbers were read.
        grid_degrees: spacing of the grid that they are of.
        years: first and last year of the initial times; which hours of the day these have no source says.
        truth: what they were scored against.
        rmse: channel -> lead time in hours -> RMSE, in the units of `_UNITS`.
    """

    system: str
    source: str
    grid_degrees: float
    years: tuple[int, int]
    truth: str
    rmse: dict[str, dict[float, float]]


@cache
def published_scores() -> tuple[Published, ...]:
    """Return everything in ``credit/verify/report/reference``."""
    folder = files("credit.verify.report") / "reference"
    texts = [path.read_text(encoding="utf-8") for path in folder.iterdir() if path.name.endswith(".yml")]
    return tuple(Published(**entry) for text in texts for entry in yaml.safe_load(text))


def comparable(table: ScoreTable, degrees: float, cases: np.ndarray, calendar: Calendar) -> list[Published]:
    """Return the published scores that the table's may stand beside, as far as its facts tell.

    Args:
        table: the scores.
        degrees: spacing of their grid.
        cases: (N,) initial times in minutes, increasing.
        calendar: their calendar.
    """
    truth, lead = str(table.dataset.attrs["truth"]).lower(), int(60 * table.lead_hours[-1])
    return [
        own
        for own in published_scores()
        if abs(own.grid_degrees / degrees - 1) < _SAME_GRID
        and own.truth.lower() in truth
        and _cover(cases, *own.years, lead, calendar)
    ]


def _cover(cases: np.ndarray, first: int, last: int, lead: int, calendar: Calendar) -> bool:
    """Return whether initial times are of these years and leave no longer gap in them than `_LONGEST_GAP`.

    The last may be `lead` minutes earlier than that, as the forecasts from the last days leave the years.
    """
    begin, end = (calendar.parse(f"{year}-01-01") for year in (first, last + 1))
    inside = begin <= cases[0] and cases[-1] < end
    return inside and bool((np.diff([begin, *cases, end - lead]) <= _LONGEST_GAP).all())


def rows_of(found: list[Published], table: ScoreTable) -> list[tuple[str, str, float, float, float, str]]:
    """Return (system, channel, lead in hours, published RMSE, the model's RMSE, source) where both have a score."""
    return [
        (own.system, channel, lead, score, table.value("model", channel, lead), own.source)
        for own in found
        for channel, scores in own.rmse.items()
        if channel in table.channels and plain(table.units(channel)) == _UNITS[channel]
        for lead, score in scores.items()
        if lead in table.lead_hours
    ]
