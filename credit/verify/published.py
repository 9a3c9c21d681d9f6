"""Published scores of other systems, shown only beside scores on the same grid, of the same years, against ERA5."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

from credit.verify.table import ScoreTable

_UNITS = {"z500": "m2 s-2", "t850": "K", "t2m": "K"}
_SAME_GRID = 0.01  # relative


@dataclass(frozen=True)
class Published:
    """Scores of one system.

    Attributes:
        system: its name.
        source: where the numbers were read.
        grid_degrees: spacing of the grid that they are of.
        years: first and last year of the initial times.
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
    """Return everything in ``credit/verify/reference``."""
    folder = files("credit.verify") / "reference"
    texts = [path.read_text(encoding="utf-8") for path in folder.iterdir() if path.name.endswith(".yml")]
    return tuple(Published(**entry) for text in texts for entry in yaml.safe_load(text))


def comparable(table: ScoreTable, degrees: float) -> list[Published]:
    """Return the published scores that the table's may stand beside, as far as its facts tell.

    Args:
        table: the scores.
        degrees: spacing of their grid.
    """
    facts = table.dataset.attrs
    first, last = (int(str(facts[key]).split("-")[0]) for key in ("first_case", "last_case"))
    return [
        own
        for own in published_scores()
        if abs(own.grid_degrees / degrees - 1) < _SAME_GRID
        and tuple(own.years) == (first, last)
        and own.truth.lower() in str(facts["truth"]).lower()
    ]


def rows_of(found: list[Published], table: ScoreTable) -> list[tuple[str, str, float, float, float, str]]:
    """Return (system, channel, lead in hours, published RMSE, the model's RMSE, source) where both have a score."""
    return [
        (own.system, channel, lead, score, table.value("model", channel, lead), own.source)
        for own in found
        for channel, scores in own.rmse.items()
        if channel in table.channels and table.units(channel) == _UNITS[channel]
        for lead, score in scores.items()
        if lead in table.lead_hours
    ]
