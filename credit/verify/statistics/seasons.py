"""Assign N cases to seasons (DJF, MAM, JJA, SON) by the month of their initial time."""

from __future__ import annotations

import numpy as np

from credit.calendar import Calendar

ALL_SEASONS = "all"
_MONTHS = {"DJF": (12, 1, 2), "MAM": (3, 4, 5), "JJA": (6, 7, 8), "SON": (9, 10, 11)}


def cases_by_season(initial_times: np.ndarray, calendar: Calendar) -> dict[str, np.ndarray]:
    """Return season name -> (N,) bool, True for the cases of the season.

    The first entry is `ALL_SEASONS` with all cases; then follow the seasons that have cases.

    Args:
        initial_times: (N,) initial times in minutes.
        calendar: calendar of these times.
    """
    month_of_case = np.array([calendar.datetime(minutes).month for minutes in initial_times.tolist()])
    # The entry for all seasons must come first, because readers of the score table select it by the index 0.
    seasons = {ALL_SEASONS: np.ones(len(initial_times), dtype=bool)}
    for name, months in _MONTHS.items():
        is_in_season = np.isin(month_of_case, months)
        if is_in_season.any():
            seasons[name] = is_in_season
    return seasons
