"""The rows of a scorecard: RMSE of channels and wind vectors, SEEPS of precipitation, Brier scores of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from credit.verify.table import SEEPS, ScoreTable


@dataclass(frozen=True)
class CardRow:
    """One score of a scorecard.

    Attributes:
        name: for people.
        score: as in scores.csv: ``rmse``, of winds, too, ``seeps``, ``brier:NAME``.
        row: number of its channel or, behind all channels, of its wind.
        prefix: of its variables in scores.nc, in which RMSE has none.
        place: along their dimension channel, wind or event.
    """

    name: str
    score: str
    row: int
    prefix: str
    place: int

    def values(self, table: ScoreTable, what: str) -> np.ndarray:
        """Return one of `credit.verify.comparison.COMPARED` or ``significant``, (references, seasons, L, R)."""
        rmse = "rmse_" if what == "difference" and self.score == "rmse" else ""
        return table.dataset[self.prefix + rmse + what].values[:, :, self.place]


def card_rows(table: ScoreTable) -> list[CardRow]:
    """Return the rows in their order."""
    data, channels = table.dataset, table.channels
    rows = [CardRow(name, "rmse", number, "", number) for number, name in enumerate(channels)]
    if "wind" in data.dims:
        levels = ["" if np.isnan(level) else f" {level:g}" for level in data["wind_level"].values]
        names = [f"{name}{level}" for name, level in zip(data["wind_variable"].values, levels, strict=True)]
        rows += [CardRow(name, "rmse", len(channels) + place, "wind_", place) for place, name in enumerate(names)]
    if f"{SEEPS}_difference" in data:
        known = np.isfinite(data[f"{SEEPS}_difference"].values).any(axis=(0, 1, 3, 4))
        rows += [CardRow(f"{channels[n]}: SEEPS", SEEPS, n, f"{SEEPS}_", n) for n in np.flatnonzero(known).tolist()]
    for number, event in enumerate(table.events):
        row = channels.index(str(data["event_channel"].values[number]))
        rows.append(CardRow(f"{event}: Brier score", f"brier:{event}", row, "brier_", number))
    return rows


def card_values(table: ScoreTable, rows: Sequence[CardRow], what: str) -> np.ndarray:
    """Return ``difference`` or ``significant`` of all rows, (references, seasons, rows, L, R) float64."""
    return np.stack([row.values(table, what) for row in rows], axis=2).astype(np.float64)
