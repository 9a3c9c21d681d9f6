"""Contender: a forecast that is scored, by the channels that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from credit.channels import take_channels
from credit.data.formats.units import Conversion
from credit.forecast.forecast_source import ForecastSource
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.deterministic import DeterministicStatistics
from credit.verify.statistics.ensemble import EnsembleStatistics


@dataclass(frozen=True)
class ScoredForecast:
    """A forecast to score.

    Attributes:
        archive: where it is.
        has: which of the scored channels it has.
        places: where they lie in its archive.
        rows: which rows of the table its sums are: its channels and the winds of which it has both components.
        means: area means of its channels and winds.
        conversions: number of a channel -> its conversion to the units of the data, of those that are in others.
        bring: brings its fields to the grid of the scores.
        is_alike: whether it is single and has all channels, so that the baselines' pass over the cells can take it.
    """

    archive: ForecastSource
    has: list[int]
    places: list[int]
    rows: list[int]
    means: AreaMean
    conversions: Mapping[int, Conversion]
    bring: Callable[[np.ndarray], np.ndarray]
    is_alike: bool

    def read(self, initial: int, lead: int) -> np.ndarray:
        """Return the members' scored channels, (M, C, H, W) float32, in the data's units; M is 1 of a single one."""
        number = self.archive.lead_minutes.tolist().index(lead)
        fields = take_channels(self.archive.read_members(initial, number), self.places)
        fields = fields.copy() if self.conversions else fields  # it may be the forecast's own memory
        for channel, conversion in self.conversions.items():
            fields[:, channel] = conversion.apply(fields[:, channel])
        return self.bring(fields)

    def sums(self, cases: np.ndarray, leads: int) -> DeterministicStatistics:
        """Return room for its sums."""
        if self.members == 1:
            return DeterministicStatistics.empty(cases, leads, self.means)
        return EnsembleStatistics.empty(cases, leads, self.means, self.members)

    def describe(self, initial: int, lead: int) -> str:
        """Return what errors call its fields."""
        return f"{self.archive.origin}: forecast from {self.archive.calendar.format(initial)} at {lead / 60:g} h"

    @property
    def members(self) -> int:
        """Number of members, 1 of a single forecast."""
        return self.archive.members or 1
