"""The rows of a scorecard: RMSE and CRPS of channels and winds, SEEPS of precipitation, Brier scores of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from credit.verify.significance.comparison import comparison_name
from credit.verify.table.table import SEEPS, ScoreTable


@dataclass(frozen=True)
class ScorecardRow:
    """One score of a scorecard.

    Attributes:
        name: for people.
        score: as in scores.csv, of winds as of channels: ``rmse``, ``crps``, ``seeps``, ``brier:NAME``.
        row: number of its channel or, behind all channels, of its wind.
        place: along its dimension channel, wind or event.
        of_wind: whether that is wind.
    """

    name: str
    score: str
    row: int
    place: int
    of_wind: bool = False

    def values(self, table: ScoreTable, what: str) -> np.ndarray:
        """Return one array of a comparison (`COMPARED` or ``significant``), (references, seasons, L, R)."""
        name = comparison_name(self.score.partition(":")[0], what)
        return table.dataset[f"wind_{name}" if self.of_wind else name].values[:, :, self.place]


def scorecard_rows(table: ScoreTable) -> list[ScorecardRow]:
    """Return the rows in their order; those of RMSE come first, in the order of channels and winds."""
    data, channels = table.dataset, table.channels
    winds: list[str] = []
    if "wind" in data.dims:
        levels = ["" if np.isnan(level) else f" {level:g}" for level in data["wind_level"].values]
        winds = [f"{name}{level}" for name, level in zip(data["wind_variable"].values, levels, strict=True)]
    rows = []
    for score, of_channel, of_wind in (("rmse", "", ""), ("crps", ": CRPS", ": energy score")):
        if f"{score}_difference" in data:
            rows += [ScorecardRow(f"{name}{of_channel}", score, n, n) for n, name in enumerate(channels)]
            rows += [
                ScorecardRow(f"{name}{of_wind}", score, len(channels) + n, n, True) for n, name in enumerate(winds)
            ]
    if f"{SEEPS}_difference" in data:
        known = np.isfinite(data[f"{SEEPS}_difference"].values).any(axis=(0, 1, 3, 4))
        rows += [ScorecardRow(f"{channels[n]}: SEEPS", SEEPS, n, n) for n in np.flatnonzero(known).tolist()]
    for number, event in enumerate(table.events):
        row = channels.index(str(data["event_channel"].values[number]))
        rows.append(ScorecardRow(f"{event}: Brier score", f"brier:{event}", row, number))
    return rows


def scorecard_values(table: ScoreTable, rows: Sequence[ScorecardRow], what: str) -> np.ndarray:
    """Return ``difference`` or ``significant`` of all rows, (references, seasons, rows, L, R) float64."""
    return np.stack([row.values(table, what) for row in rows], axis=2).astype(np.float64)
