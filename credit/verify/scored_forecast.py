"""A forecast under evaluation, with the channels that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from credit.channels import take_channels
from credit.data.formats.units import Conversion
from credit.forecast.forecast_source import ForecastSource
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.case_statistics import DeterministicStatistics, EnsembleStatistics


@dataclass(frozen=True)
class ScoredForecast:
    """A forecast under evaluation.

    Shapes: M members, C channels that the forecast has and that are scored, h x w cells of its grid, H x W cells of the
    grid of the scores.

    Attributes:
        archive: source of the forecasts.
        channels: (C,) indices of the channels of the forecast among all scored channels.
        archive_channels: (C,) indices of these channels in `archive`.
        rows: indices of the rows of the table that the forecast has: its channels, and the winds of which it has both
            components.
        area_mean: area means over these channels and winds.
        conversions: index among the C channels -> conversion to the units of the data, for channels in other units.
        regrid: function that regrids fields (..., C, h, w) to the grid of the scores, (..., C, H, W).
        shares_baseline_channels: True for a single forecast that has all scored channels. Its errors are then summed
            together with those of the baselines.
    """

    archive: ForecastSource
    channels: list[int]
    archive_channels: list[int]
    rows: list[int]
    area_mean: AreaMean
    conversions: Mapping[int, Conversion]
    regrid: Callable[[np.ndarray], np.ndarray]
    shares_baseline_channels: bool

    @property
    def num_members(self) -> int:
        """Number of members, 1 for a single forecast."""
        return self.archive.members or 1

    def read(self, initial_time: int, lead: int) -> np.ndarray:
        """Return the scored channels of all members on the grid of the scores, (M, C, H, W) in the units of the data.

        Values are float32. M is 1 for a single forecast.

        Args:
            initial_time: initial time in minutes.
            lead: lead time in minutes.

        Raises:
            ValueError: if the archive has no such lead time.
            DataError: if the forecast cannot be read.
        """
        lead_index = self.archive.lead_minutes.tolist().index(lead)
        fields_MCHW = take_channels(self.archive.read_members(initial_time, lead_index), self.archive_channels)
        if self.conversions:
            # The fields may be the archive's own memory.
            fields_MCHW = fields_MCHW.copy()
        for channel, conversion in self.conversions.items():
            fields_MCHW[:, channel] = conversion.apply(fields_MCHW[:, channel])
        return self.regrid(fields_MCHW)

    def empty_statistics(self, cases: np.ndarray, num_leads: int) -> DeterministicStatistics:
        """Return statistics of cases at a number of lead times, NaN until fields are added.

        Args:
            cases: (N,) initial times in minutes.
            num_leads: number of lead times.
        """
        if self.num_members == 1:
            return DeterministicStatistics.empty(cases, num_leads, self.area_mean)
        return EnsembleStatistics.empty(cases, num_leads, self.area_mean, self.num_members)

    def describe(self, initial_time: int, lead: int) -> str:
        """Return a description of the fields at a lead time for error messages; both times are in minutes."""
        return f"{self.archive.origin}: forecast from {self.archive.calendar.format(initial_time)} at {lead / 60:g} h"
