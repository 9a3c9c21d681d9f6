"""Rows of a scorecard: RMSE and CRPS of channels and winds, SEEPS of precipitation, Brier scores of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from credit.verify.significance.comparison import comparison_name
from credit.verify.table.table import SEEPS, ScoreTable


@dataclass(frozen=True)
class ScorecardRow:
    """Row of a scorecard: one score of one channel, wind vector or event.

    Shapes: L lead times, R regions.

    Attributes:
        name: label of the row for readers, such as ``z500: CRPS``.
        score: name of the score: ``rmse``, ``crps``, ``seeps`` or ``brier:EVENT``. Scores of winds have the same names
            as scores of channels.
        row: index of the channel or wind in the list of all channels followed by all wind vectors; for an event, index
            of its channel.
        index: index in the dataset of the score table, along the dimension channel, wind or event.
        is_wind: True if the row is a wind vector.
    """

    name: str
    score: str
    row: int
    index: int
    is_wind: bool = False

    def values(self, table: ScoreTable, result: str) -> np.ndarray:
        """Return a result of the comparison of the model with the references for the score of this row.

        Args:
            table: the scores.
            result: name of the result, one of `COMPARISON_NAMES` or `SIGNIFICANCE_NAMES` of
                `credit.verify.significance.comparison`.

        Returns:
            (references, seasons, L, R) values.
        """
        # The variable name is the part of the score before the colon; the event after the colon selects the row.
        name = comparison_name(self.score.partition(":")[0], result)
        if self.is_wind:
            name = f"wind_{name}"
        return table.dataset[name].values[:, :, self.index]


def scorecard_rows(table: ScoreTable) -> list[ScorecardRow]:
    """Return the rows of the scorecard of a table.

    The order is: RMSE of all channels and winds; CRPS of all channels and winds if there is an ensemble; SEEPS; Brier
    scores of events.
    """
    data = table.dataset
    channels = table.channels
    # The label of a wind is its name, followed by the level if the wind has a level.
    winds: list[str] = []
    if "wind" in data.dims:
        for name, level in zip(data["wind_variable"].values, data["wind_level"].values, strict=True):
            label = name
            if not np.isnan(level):
                label += f" {level:g}"
            winds.append(label)
    rows = []
    for score, channel_suffix, wind_suffix in (("rmse", "", ""), ("crps", ": CRPS", ": energy score")):
        # The CRPS is compared only if there is an ensemble.
        if f"{score}_difference" not in data:
            continue
        for number, name in enumerate(channels):
            rows.append(ScorecardRow(f"{name}{channel_suffix}", score, number, number))
        for number, name in enumerate(winds):
            rows.append(ScorecardRow(f"{name}{wind_suffix}", score, len(channels) + number, number, is_wind=True))
    if f"{SEEPS}_difference" in data:
        # Axis 2 is the channel; only channels with precipitation have values.
        has_seeps = np.isfinite(data[f"{SEEPS}_difference"].values).any(axis=(0, 1, 3, 4))
        for number in np.flatnonzero(has_seeps).tolist():
            rows.append(ScorecardRow(f"{channels[number]}: SEEPS", SEEPS, number, number))
    for number, event in enumerate(table.events):
        row = channels.index(str(data["event_channel"].values[number]))
        rows.append(ScorecardRow(f"{event}: Brier score", f"brier:{event}", row, number))
    return rows


def scorecard_values(table: ScoreTable, rows: Sequence[ScorecardRow], result: str) -> np.ndarray:
    """Return a result of the comparison for all rows, (references, seasons, rows, L, R) float64.

    Args:
        table: the scores.
        rows: rows from `scorecard_rows`.
        result: name of the result, such as ``difference`` or ``significant``, see `ScorecardRow.values`.
    """
    return np.stack([row.values(table, result) for row in rows], axis=2).astype(np.float64)
