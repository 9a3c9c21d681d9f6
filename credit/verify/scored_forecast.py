"""Source of forecasts together with its scored channels, unit conversions and regridding.

Shapes: M members, N cases, C scored channels that the forecast has, h x w cells of the grid of the forecast, H x W
cells of the grid of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from credit.channels import select_channels
from credit.data.formats.units import Conversion
from credit.forecast.forecast_source import ForecastSource
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.case_statistics import DeterministicStatistics, EnsembleStatistics


@dataclass(frozen=True)
class ScoredForecast:
    """Source of forecasts with the properties that scoring needs.

    Attributes:
        archive: source of the forecasts.
        channels: (C,) index of each channel among the scored channels of the verification.
        archive_channels: (C,) index of each channel in ``archive.channel_names``.
        rows: indices of the rows of the score table for which the forecast has scores: its channels, and the wind
            vectors for which it has both components.
        area_mean: area means of the C channels and of these wind vectors.
        conversions: index among the C channels -> conversion to the units of the data; channels that need no conversion
            have no entry.
        regrid: function that regrids fields (..., C, h, w) to the grid of the scores, (..., C, H, W).
        shares_baseline_channels: True for a single forecast that has all scored channels. Its errors and the errors of
            the baselines are computed in the same pass, which is faster.
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
        """Return the forecast from one initial time at one lead time.

        Args:
            initial_time: initial time in minutes.
            lead: lead time in minutes.

        Returns:
            (M, C, H, W) float32 on the grid of the scores, in the units of the data; M is 1 for a single forecast.

        Raises:
            ValueError: if the archive has no such lead time.
            DataError: if the forecast cannot be read.
        """
        # The archive may have lead times that are not scored, so the index refers to all lead times of the archive.
        lead_index = self.archive.lead_minutes.tolist().index(lead)
        fields_MCHW = select_channels(self.archive.read_members(initial_time, lead_index), self.archive_channels)
        if self.conversions:
            # The array may belong to the archive, so the in-place conversion works on a copy.
            fields_MCHW = fields_MCHW.copy()
        for channel, conversion in self.conversions.items():
            fields_MCHW[:, channel] = conversion.apply(fields_MCHW[:, channel])
        return self.regrid(fields_MCHW)

    def create_statistics(self, cases: np.ndarray, num_leads: int) -> DeterministicStatistics:
        """Return new error statistics of this forecast; all values are NaN until errors are added.

        Args:
            cases: (N,) initial times in minutes.
            num_leads: number of lead times.
        """
        # An ensemble of one member has neither spread nor ranks, so it is scored as a single forecast.
        if self.num_members == 1:
            return DeterministicStatistics.empty(cases, num_leads, self.area_mean)
        return EnsembleStatistics.empty(cases, num_leads, self.area_mean, self.num_members)

    def describe(self, initial_time: int, lead: int) -> str:
        """Return a phrase with the origin, initial time and lead time of a forecast, for error messages.

        Args:
            initial_time: initial time in minutes.
            lead: lead time in minutes.
        """
        return f"{self.archive.origin}: forecast from {self.archive.calendar.format(initial_time)} at {lead / 60:g} h"
