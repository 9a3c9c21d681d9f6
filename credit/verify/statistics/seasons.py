"""Seasons of scores, by the month of the initial time."""

from __future__ import annotations

import numpy as np

from credit.calendar import Calendar

ALL = "all"
_BY_MONTH = {"DJF": (12, 1, 2), "MAM": (3, 4, 5), "JJA": (6, 7, 8), "SON": (9, 10, 11)}


def cases_by_season(initial: np.ndarray, calendar: Calendar) -> dict[str, np.ndarray]:
    """Return season -> (N,) bool, whether a case belongs to it: all, then the seasons that have cases."""
    months = np.array([calendar.datetime(minutes).month for minutes in initial.tolist()])
    seasons = {name: np.isin(months, own) for name, own in _BY_MONTH.items()}
    return {ALL: np.ones(len(initial), dtype=bool)} | {name: own for name, own in seasons.items() if own.any()}
