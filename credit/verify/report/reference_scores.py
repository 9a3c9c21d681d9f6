"""Published scores of other forecast systems, for comparison with scores on the same grid, truth and whole years.

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

# Channels of the published scores -> their units.
_UNITS = {"z500": "m2 s-2", "t850": "K", "t2m": "K"}
# Two grids count as equal if their spacings differ by less than this fraction.
_GRID_TOLERANCE = 0.01
# Initial times cover a year if neighbouring ones are at most this many minutes apart. Weather systems last about as
# long, so none of them is missed.
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
        rmse: channel name -> {lead time in hours: global RMSE}, in the units that `_UNITS` lists.
    """

    system: str
    source: str
    grid_degrees: float
    years: tuple[int, int]
    truth: str
    rmse: dict[str, dict[float, float]]


@cache
def load_published_scores() -> tuple[PublishedScores, ...]:
    """Return all published scores, which are in the YAML files of ``credit/verify/report/reference``."""
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
        # The truth of a table is given by the paths of its sources, which usually name the reanalysis.
        has_same_truth = published.truth.lower() in truth
        if has_same_grid and has_same_truth and _covers_years(cases, *published.years, longest_lead, calendar):
            comparable.append(published)
    return comparable


def _covers_years(cases: np.ndarray, first: int, last: int, lead: int, calendar: Calendar) -> bool:
    """Return True if all initial times lie in a period of whole years and have no gap longer than `_MAX_GAP`.

    The gap at the end of the period may be longer by the longest lead time, because forecasts from the last days end
    after the period and may not be scored.

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
    # Gaps between neighbours, and to the beginning and the end of the years. With the end moved by the lead time, the
    # last gap may be longer or even negative.
    gaps = np.diff([start, *cases, end - lead])
    return is_inside and bool((gaps <= _MAX_GAP).all())


def compare_with_published(
    comparable: list[PublishedScores], table: ScoreTable
) -> list[tuple[str, str, float, float, float, str]]:
    """Return the published RMSE next to that of the model, for each channel and lead time that both have.

    Channels whose units differ from those of the publications are left out.

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
