"""Published scores of other forecast systems, for comparison with scores of the same grid, truth and complete years.

Shapes: N cases (initial times).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import yaml

from credit.calendar import Calendar
from credit.data.formats.units import normalise_units
from credit.verify.table.table import ScoreTable

# Channel of the published scores -> units.
_UNITS = {"z500": "m2 s-2", "t850": "K", "t2m": "K"}
# Two grids are treated as equal if their spacings differ by less than this fraction.
_GRID_TOLERANCE = 0.01
# Largest gap in minutes between neighbouring initial times that cover a year. The gap is about the lifetime of weather
# systems, so no weather system is missed.
_MAX_GAP = 5 * 1440


@dataclass(frozen=True)
class PublishedScores:
    """Published scores of one forecast system.

    Attributes:
        system: name of the forecast system.
        source: publication with the scores.
        grid_degrees: spacing of the grid of the scores in degrees.
        years: (first, last) year of the initial times; the publications do not state the hours of the day.
        truth: name of the reanalysis against which the system was scored.
        rmse: channel name -> lead time in hours -> global RMSE, in the units of `_UNITS`.
    """

    system: str
    source: str
    grid_degrees: float
    years: tuple[int, int]
    truth: str
    rmse: dict[str, dict[float, float]]


@cache
def load_published_scores() -> tuple[PublishedScores, ...]:
    """Load all published scores from the YAML files in ``credit/verify/report/reference``."""
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
    """Return the published scores that have the same grid, years and truth as a score table.

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
        # The attribute `truth` contains the paths of the data, which usually contain the name of the reanalysis.
        has_same_truth = published.truth.lower() in truth
        if has_same_grid and has_same_truth and _covers_years(cases, *published.years, longest_lead, calendar):
            comparable.append(published)
    return comparable


def _covers_years(cases: np.ndarray, first: int, last: int, lead: int, calendar: Calendar) -> bool:
    """Return True if all initial times are in a period of complete years and have no gap longer than `_MAX_GAP`.

    The gap at the end of the period may be longer by the longest lead time. Forecasts from the last days end after the
    period, so they may have no scores.

    Args:
        cases: (N,) initial times in minutes, increasing.
        first: first year.
        last: last year.
        lead: longest lead time in minutes.
        calendar: calendar of the initial times.
    """
    start = calendar.parse(f"{first}-01-01")
    end = calendar.parse(f"{last + 1}-01-01")
    is_inside = start <= cases[0] and cases[-1] < end
    # The gaps include the gaps to the beginning and to the end of the years. The end is moved back by the lead time, so
    # the last gap may be negative.
    gaps = np.diff([start, *cases, end - lead])
    return is_inside and bool((gaps <= _MAX_GAP).all())


def compare_with_published(
    comparable: list[PublishedScores], table: ScoreTable
) -> list[tuple[str, str, float, float, float, str]]:
    """Return the published RMSE and the RMSE of the model for each channel and lead time that both have.

    Channels are left out if their units differ from the units in the publications.

    Args:
        comparable: published scores from `select_comparable_scores`.
        table: the scores of the model.

    Returns:
        Rows (system, channel, lead time in hours, published RMSE, RMSE of the model, source), with RMSE in the units of
        the channel.
    """
    rows = []
    for published in comparable:
        for channel, scores in published.rmse.items():
            if channel not in table.channels:
                continue
            # Scores in other units cannot be compared.
            if normalise_units(table.units(channel)) != _UNITS[channel]:
                continue
            for lead, score in scores.items():
                if lead in table.lead_hours:
                    model = table.score("model", channel, lead)
                    rows.append((published.system, channel, lead, score, model, published.source))
    return rows
