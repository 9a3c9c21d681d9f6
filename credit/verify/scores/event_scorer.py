"""Score events (Brier score, reliability) and precipitation categories (SEEPS) with thresholds from the climate.

The climate is a sample of the training period, see `credit.verify.scores.climatological_sample`.

Shapes: N cases, L lead times, C scored channels, M members, H x W = P cells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from credit.channels import Channel
from credit.config.sections.verification import VerificationConfig
from credit.data.splits import Split
from credit.verify.partial_scores import PartialScores
from credit.verify.regridded_reader import RegriddedReader
from credit.verify.scores.climatological_sample import WITHIN_DAYS, ClimatologicalSample
from credit.verify.scores.events import EventStatistics
from credit.verify.scores.seeps import SeepsStatistics
from credit.verify.scores.thresholds import (
    EventThresholds,
    build_events,
    find_precipitation_channels,
    has_enough_climate_times,
)
from credit.verify.statistics.area_mean import AreaMean

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CommonSample:
    """Cases and lead times on which all forecasts are scored.

    Attributes:
        cases: (N,) initial times in minutes, for all processes together.
        leads: (L,) lead times in minutes.
        groups: the same initial times in groups. All cases of a group are scored at the first lead time, then at the
            next lead time.
    """

    cases: np.ndarray
    leads: np.ndarray
    groups: Sequence[Sequence[int]]


class EventScorer:
    """Scorer of events and of precipitation categories (SEEPS).

    Args:
        config: config section `verification`; the events, the channels of SEEPS and ``climatology.by_hour`` are used.
        reader: reader of the data on the grid of the scores.
        channels: the C scored channels.
        area_mean: area means of the scored channels.
        truth: function of a time in minutes that returns the truth, (C, H, W) in the units of the data.
        train: the training period, from which thresholds and climatological probabilities are computed.
        sample: cases and lead times of all processes.

    Attributes:
        events: the scored events.
        precipitation: the channels for which SEEPS is computed.
        channels: indices, among the scored channels, of the channels that events or SEEPS need.

    Raises:
        ConfigError: if an event or SEEPS cannot be computed for a channel that the config names.
    """

    def __init__(
        self,
        config: VerificationConfig,
        reader: RegriddedReader,
        channels: Sequence[Channel],
        area_mean: AreaMean,
        truth: Callable[[int], np.ndarray],
        train: Split,
        sample: CommonSample,
    ) -> None:
        self.events = build_events(config.events, channels, reader.attributes)
        self.precipitation = find_precipitation_channels(config.seeps, channels, reader.attributes)
        self.channels = sorted({scored.channel for scored in (*self.events, *self.precipitation)})
        self._area_mean = area_mean
        self._names = [channel.name for channel in channels]
        self._thresholds: EventThresholds | None = None
        self._has_climate = False
        self._climate_description = "not known"
        # Without events and SEEPS, no training data are read.
        if not self.channels:
            return

        def read_training_fields(minutes: int) -> np.ndarray:
            description = f"training data at {reader.calendar.format(minutes)}"
            return area_mean.flatten(truth(minutes), description)[self.channels]

        # The climate of the channels of events and SEEPS is used only if the training period is long enough.
        cells = area_mean.valid_CP.shape[1]
        field_bytes = 4 * len(self.channels) * cells
        climate = ClimatologicalSample(
            read_training_fields, reader.times, train, reader.calendar, config.climatology.by_hour, field_bytes
        )
        # The climate is needed at the valid times of all cases and lead times.
        valid_times = np.unique(sample.cases[:, None] + sample.leads)
        self._has_climate = has_enough_climate_times(
            self.events, climate, valid_times, train.describe(reader.calendar), reader.calendar
        )
        if self._has_climate:
            num_times, _ = climate.smallest_season(valid_times)
            self._climate_description = (
                f"at least {num_times} times of the training period within {WITHIN_DAYS} days of the time of the year"
            )
            if config.climatology.by_hour:
                self._climate_description += ", at the same hour of the day"
        # All forecasts of a group are scored at the first lead time, then at the next lead time. The cache must be
        # large enough for the seasons of all their valid times; otherwise thresholds would be computed repeatedly.
        num_seasons_of_groups = []
        for group in sample.groups:
            group_times = (np.array(group)[:, None] + sample.leads).ravel()
            seasons = {climate.season_of(minutes) for minutes in group_times.tolist()}
            num_seasons_of_groups.append(len(seasons))
        climate_index = {channel: index for index, channel in enumerate(self.channels)}
        self._thresholds = EventThresholds(
            self.events,
            self.precipitation,
            climate if self._has_climate else None,
            climate_index,
            cells,
            cached_seasons=1 + max(num_seasons_of_groups),
        )

    def create_statistics(
        self, cases: np.ndarray, num_leads: int, num_members: Mapping[str, int]
    ) -> tuple[dict[str, EventStatistics], dict[str, SeepsStatistics]]:
        """Return new statistics of events and SEEPS for each forecast and baseline; all values are NaN.

        Args:
            cases: (N,) initial times in minutes.
            num_leads: number of lead times.
            num_members: name of each forecast and baseline -> number of members.

        Returns:
            (event statistics by name, SEEPS statistics by name), for each forecast and baseline. The first dict is
            empty if no event is scored. It has no entry for the climatology, because every other entry also contains
            the Brier score of the climatological probability. The second dict is empty if SEEPS is not computed.
        """
        regions = self._area_mean.shape[1]
        event_statistics = {}
        seeps_statistics = {}
        for name, count in num_members.items():
            if self.events and name != "climatology":
                event_statistics[name] = EventStatistics.empty(cases, num_leads, len(self.events), regions, count)
            if self.precipitation:
                seeps_statistics[name] = SeepsStatistics.empty(
                    cases, num_leads, len(self.precipitation), regions, count
                )
        return event_statistics, seeps_statistics

    def add(
        self,
        scores: PartialScores,
        name: str,
        index: tuple[int, int],
        valid_time: int,
        members_MCHW: np.ndarray,
        truth_CHW: np.ndarray,
        channels: Sequence[int],
    ) -> None:
        """Add the scores of events and SEEPS of one case at one lead time to the partial scores.

        The statistics of channels that the forecast does not have remain NaN. All fields are in the units of the data;
        masked cells may contain any value.

        Args:
            scores: partial scores to which the statistics belong.
            name: name of the forecast.
            index: (index of the case, index of the lead time).
            valid_time: valid time in minutes.
            members_MCHW: members of the forecast, with the channels that `channels` lists.
            truth_CHW: truth with all scored channels.
            channels: index, among all scored channels, of each channel of `members_MCHW`.

        Raises:
            DataError: if the number of members differs from other cases.
        """
        if self._thresholds is None:
            return
        event_pairs, seeps_pairs = self._thresholds.thresholds_at(valid_time)
        members_MCP = members_MCHW.reshape(*members_MCHW.shape[:-2], -1)
        truth_CP = truth_CHW.reshape(*truth_CHW.shape[:-2], -1)
        for number, (event, thresholds) in enumerate(zip(self.events, event_pairs, strict=True)):
            # Events are skipped if the forecast does not have their channel; the climatology has no event statistics.
            if event.channel not in channels or name not in scores.events:
                continue
            # `EventStatistics` needs events above a threshold. A value is below a threshold if the value times -1 is
            # above the threshold times -1.
            members_MP = members_MCP[:, channels.index(event.channel)]
            scores.events[name].add(
                (*index, number),
                self._area_mean,
                event.channel,
                event.sign * members_MP,
                event.sign * truth_CP[event.channel],
                *thresholds,
            )
        # The categories of SEEPS are defined for precipitation in mm.
        for number, (precipitation, thresholds) in enumerate(zip(self.precipitation, seeps_pairs, strict=True)):
            if precipitation.channel not in channels:
                continue
            members_MP = members_MCP[:, channels.index(precipitation.channel)]
            scores.seeps[name].add(
                (*index, number),
                self._area_mean,
                precipitation.channel,
                members_MP.astype(np.float64) * precipitation.to_mm,
                truth_CP[precipitation.channel].astype(np.float64) * precipitation.to_mm,
                *thresholds,
            )

    def attributes(self) -> dict[str, str]:
        """Return the global attributes of scores.nc that describe events and climate.

        The result is empty if neither events nor SEEPS are scored.
        """
        if self._thresholds is None:
            return {}
        attributes = {}
        if self.events:
            attributes["events"] = "; ".join(f"{event.name}: {event.definition}" for event in self.events)
        attributes["climate_of_events"] = self._climate_description
        return attributes

    def warn_of_missing_seeps(self, seeps: SeepsStatistics | None) -> None:
        """Log a warning for each channel without SEEPS because its climate is too dry or too wet in all cells.

        Args:
            seeps: SEEPS statistics of any forecast; None if SEEPS is not computed.
        """
        if seeps is None or not self._has_climate:
            return
        for number, precipitation in enumerate(self.precipitation):
            # The area does not depend on the forecast, so the statistics of any forecast can be used.
            if not (seeps.area[:, :, number] > 0).any():
                logger.warning(
                    "%s: SEEPS is not computed, because no cell is dry (below 0.25 mm) with a frequency of 0.1 to 0.85 "
                    "in the training period",
                    self._names[precipitation.channel],
                )
