"""Interface to forecasts for scoring: read from files or stores, or made by a network during the scoring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from credit.calendar import Calendar
from credit.grid import LatLonGrid


class ForecastSource(ABC):
    """Base class of the forecasts of one model, which all have the same lead times and channels.

    Attributes:
        origin: folder, store, URL or checkpoint from which the forecasts come, for messages.
        initial_minutes: initial times in minutes, increasing, int64.
        lead_minutes: lead times in minutes, increasing, int64.
        members: number of ensemble members, None for single forecasts.
        channel_names: names of the channels, such as ``z500`` and ``t2m``.
        names_without_levels: names of the channels without a vertical level, such as ``t2m``.
        units: units by name of the variable; a variable with unknown units has no entry.
        grid: grid in canonical orientation.
        calendar: calendar of the times.
        attributes: description of the run, as in the global attributes of forecast files.
    """

    origin: Path | str
    initial_minutes: np.ndarray
    lead_minutes: np.ndarray
    members: int | None
    channel_names: list[str]
    names_without_levels: frozenset[str]
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
            Fields (M, C, H, W) float32 of members, channels, rows and columns, in the units of `units`, NaN
            where missing. M is 1 for a single forecast.

        Raises:
            DataError: if the forecast cannot be read.
        """

    def initial_time_groups(self) -> list[list[int]]:
        """Return the initial times, in minutes, in groups whose forecasts are read together.

        The caller reads all forecasts of a group at the first lead time, then all of them at the next lead time, and so
        on.
        """
        return [[minutes] for minutes in self.initial_minutes.tolist()]

    def join_collectives(self, leads: Sequence[int], initial_times: Sequence[int] = ()) -> None:
        """Collective: compute the same number of forecast steps as the ranks that read forecasts, without a result.

        With a sharded network, every step of a forecast is a collective, so all ranks must compute it. A rank without
        further groups calls this method while other ranks read their groups. A rank that computes ensemble members for
        another rank calls it for each group that the other rank reads. The base class does nothing, because forecasts
        in files need no collectives.

        Args:
            leads: lead times in minutes that the other ranks read.
            initial_times: initial times in minutes of the group whose members this rank computes. Empty if this rank
                only joins the collectives; it then computes an arbitrary forecast.
        """
        return
