"""Forecasts: what scoring asks of forecasts, whether they lie on disk or are made while they are scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from credit.calendar import Calendar
from credit.grid import LatLonGrid


class ForecastSource(ABC):
    """Forecasts of one model with the same lead times and channels.

    Attributes:
        origin: the folder, store, URL or checkpoint that they come from.
        initial_minutes: initial times, increasing, int64.
        lead_minutes: lead times, increasing, int64.
        members: number of an ensemble's members, None for single forecasts.
        channel_names: names such as ``z500`` and ``t2m``.
        flat_names: those of channels without a level.
        units: variable -> units, where they are known.
        grid: the grid, in canonical orientation.
        calendar: the calendar.
        attributes: what describes the run, as in the global attributes of files.
    """

    origin: Path | str
    initial_minutes: np.ndarray
    lead_minutes: np.ndarray
    members: int | None
    channel_names: list[str]
    flat_names: frozenset[str]
    units: Mapping[str, str]
    grid: LatLonGrid
    calendar: Calendar
    attributes: Mapping[str, object]

    @abstractmethod
    def read_members(self, initial_minutes: int, number: int) -> np.ndarray:
        """Return all members at one lead time, (M, C, H, W) float32, NaN where missing; M is 1 for a single forecast.

        Args:
            initial_minutes: its initial time.
            number: which of `lead_minutes`.

        Raises:
            DataError: if it cannot be read.
        """

    def groups(self) -> list[list[int]]:
        """Return the initial times in groups, each to be read side by side: lead time after lead time, all of them."""
        return [[minutes] for minutes in self.initial_minutes.tolist()]

    def keep_company(self, leads: Sequence[int]) -> None:
        """Do what a group's forecasts to these lead times ask of all ranks; files ask nothing."""
        return
