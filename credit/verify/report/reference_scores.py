"""Published scores of other systems, for comparison with scores on the same grid and of the same whole years."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import yaml

from credit.calendar import Calendar
from credit.data.formats.units import normalise_units
from credit.verify.table.table import ScoreTable

# Channels of the published scores -> their units.
_UNITS = {"z500": "m2 s-2", "t850": "K", "t2m": "K"}
# Relative difference of the spacing of two grids that count as one.
_GRID_TOLERANCE = 0.01
# Largest distance of initial times in minutes. Weather systems last about as long, so none of a year is missed.
_MAX_GAP = 5 * 1440


@dataclass(frozen=True)
class PublishedScores:
    """Scores of one system.

    Attributes:
        system: name of the system.
        source: publication with the scores.
        grid_degrees: spacing of the grid of the scores in degrees.
        years: first and last year of the initial times; the publications do not name the hours of the day.
        truth: name of the reanalysis against which the system was scored.
        rmse: channel -> lead time in hours -> RMSE, in the units of `_UNITS`.
    """

    system: str
    source: str
    grid_degrees: float
    years: tuple[int, int]
    truth: str
    rmse: dict[str, dict[float, float]]


@cache
def load_published_scores() -> tuple[PublishedScores, ...]:
    """Return all scores in the YAML files of ``credit/verify/report/reference``."""
    scores = []
    for path in (files("credit.verify.report") / "reference").iterdir():
        if not path.name.endswith(".yml"):
            continue
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            scores.append(PublishedScores(**entry))
    return tuple(scores)


def select_comparable_scores(
    table: ScoreTable, grid_degrees: float, cases: np.ndarray, calendar: Calendar
) -> list[PublishedScores]:
    """Return the published scores on the grid, of the years and against the truth of a table.

    Args:
        table: the scores.
        grid_degrees: spacing of the grid of the scores in degrees.
        cases: (N,) initial times in minutes, increasing.
        calendar: calendar of the initial times.
    """
    truth = str(table.dataset.attrs["truth"]).lower()
    longest_lead = int(60 * table.lead_hours[-1])
    comparable = []
    for published in load_published_scores():
        has_same_grid = abs(published.grid_degrees / grid_degrees - 1) < _GRID_TOLERANCE
        has_same_truth = published.truth.lower() in truth
        if has_same_grid and has_same_truth and _covers_years(cases, *published.years, longest_lead, calendar):
            comparable.append(published)
    return comparable


def _covers_years(cases: np.ndarray, first: int, last: int, lead: int, calendar: Calendar) -> bool:
    """Return True if all initial times are in these years, without a gap longer than `_MAX_GAP`.

    The gap at the end of the years may be longer by `lead` minutes, as forecasts from the last days end after them.
    """
    start = calendar.parse(f"{first}-01-01")
    end = calendar.parse(f"{last + 1}-01-01")
    is_inside = start <= cases[0] and cases[-1] < end
    # Gaps between neighbours, and to the beginning and the end of the years.
    gaps = np.diff([start, *cases, end - lead])
    return is_inside and bool((gaps <= _MAX_GAP).all())


def compare_with_published(
    comparable: list[PublishedScores], table: ScoreTable
) -> list[tuple[str, str, float, float, float, str]]:
    """Return (system, channel, lead in hours, published RMSE, RMSE of the model, source) of the scores that both have.

    RMSE is in the units of the channel. Channels whose units differ from those of the publications are left out.
    """
    rows = []
    for published in comparable:
        for channel, scores in published.rmse.items():
            if channel not in table.channels or normalise_units(table.units(channel)) != _UNITS[channel]:
                continue
            for lead, score in scores.items():
                if lead in table.lead_hours:
                    model = table.score("model", channel, lead)
                    rows.append((published.system, channel, lead, score, model, published.source))
    return rows
