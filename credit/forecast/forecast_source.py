"""Interface of the forecasts that are scored: files, stores, or forecasts that a network makes meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from credit.calendar import Calendar
from credit.grid import LatLonGrid


class ForecastSource(ABC):
    """Forecasts of one model, all with the same lead times and channels.

    Attributes:
        origin: folder, store, URL or checkpoint of the forecasts, for messages.
        initial_minutes: initial times in minutes, increasing, int64.
        lead_minutes: lead times in minutes, increasing, int64.
        members: number of ensemble members, None for single forecasts.
        channel_names: names of the channels, such as ``z500`` and ``t2m``.
        flat_names: names of the channels without a level.
        units: variable -> units; variables with unknown units are missing.
        grid: grid in canonical orientation.
        calendar: calendar of the times.
        attributes: description of the run, as in the global attributes of forecast files.
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
    def read_members(self, initial_minutes: int, lead_index: int) -> np.ndarray:
        """Return all members at one lead time.

        Args:
            initial_minutes: initial time in minutes.
            lead_index: index of the lead time in `lead_minutes`.

        Returns:
            (M, C, H, W) float32 in the units of `units`, NaN where missing; M is 1 for a single forecast.

        Raises:
            DataError: if the forecast cannot be read.
        """

    def initial_time_groups(self) -> list[list[int]]:
        """Return the initial times (in minutes) in groups.

        The forecasts of a group are read side by side: all of them at the first lead time, then at the next one.
        """
        return [[minutes] for minutes in self.initial_minutes.tolist()]

    def join_collectives(self, leads: Sequence[int], initial_times: Sequence[int] = ()) -> None:
        """Collective: run the network as the other ranks do, and discard the forecast.

        A rank calls this when its own forecasts are complete. A rank that computes members for another rank calls it
        for every group. Forecasts in files have no collectives.

        Args:
            leads: lead times in minutes that the other ranks read.
            initial_times: initial times in minutes of the group that another rank reads; empty if this rank has none.
        """
        return
