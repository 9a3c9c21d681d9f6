"""ThresholdScorer: scores of events and of categories of precipitation, whose limits come from the climate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from credit.channels import Channel
from credit.config.schema_verification import VerificationConfig
from credit.data.splits import Split
from credit.verify.regridded_reader import RegriddedReader
from credit.verify.scores.climatological_sample import WITHIN_DAYS, ClimatologicalSample
from credit.verify.scores.events import EventStatistics
from credit.verify.scores.seeps import SeepsSums
from credit.verify.scores.thresholds import EventThresholds, find_events, find_precipitation, require_climate
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.partial_scores import PartialScores

logger = logging.getLogger(__name__)


class EventScorer:
    """What is scored of events and precipitation, and how a field is added to the sums.

    Attributes:
        channels: numbers of the channels that it needs.

    Args:
        conf: events, precipitation, whether the climate has hours.
        reader: of the data, on the grid of the scores.
        channels: the C channels that are scored.
        means: area means of them.
        truth: minutes -> (C, H, W) of the data.
        train: the training period.
        cases: (N,) initial times in minutes, all of them, whoever scores them.
        leads: (L,) lead times in minutes.
        groups: the cases that are scored side by side, lead time after lead time.

    Raises:
        ConfigError: if an event or a channel of precipitation cannot be scored.
    """

    def __init__(
        self,
        conf: VerificationConfig,
        reader: RegriddedReader,
        channels: Sequence[Channel],
        means: AreaMean,
        truth: Callable[[int], np.ndarray],
        train: Split,
        cases: np.ndarray,
        leads: np.ndarray,
        groups: Sequence[Sequence[int]],
    ) -> None:
        self.events = find_events(conf.events, channels, reader.attributes)
        self.precipitation = find_precipitation(conf.seeps, channels, reader.attributes)
        self._means, self._names = means, [channel.name for channel in channels]
        self._limits: EventThresholds | None = None
        used = self.channels = sorted({own.channel for own in (*self.events, *self.precipitation)})
        if not used:
            return
        cells = means.valid_CP.shape[1]
        climate = ClimatologicalSample(
            lambda minutes: means.flatten(truth(minutes), f"training data at {reader.calendar.format(minutes)}")[used],
            reader.times, train, reader.calendar, conf.climatology.by_hour, 4 * len(used) * cells,
        )  # fmt: skip
        valid_times = np.unique(cases[:, None] + leads)
        known = require_climate(self.events, climate, valid_times, train.describe(reader.calendar), reader.calendar)
        self._climate_description = "not known"
        if known:
            hour = ", at the same hour of the day" if conf.climatology.by_hour else ""
            self._climate_description = (
                f"at least {climate.fewest(valid_times)[0]} times of the training period within {WITHIN_DAYS} days of "
                f"the time of the year{hour}"
            )
        kept = 1 + max(len({climate.season(t + lead) for t in own for lead in leads.tolist()}) for own in groups)
        self._is_known = known
        self._limits = EventThresholds(
            self.events, self.precipitation, climate if known else None, {c: i for i, c in enumerate(used)}, cells, kept
        )

    def empty(
        self, cases: np.ndarray, leads: int, members: Mapping[str, int]
    ) -> tuple[dict[str, EventStatistics], dict[str, SeepsSums]]:
        """Return room for the sums of forecasts of so many members each; nothing where nothing is scored.

        The climatology's probability of an event is in the sums of every forecast, so it has none of its own.
        """
        regions = self._means.shape[1]
        events, rain = len(self.events), len(self.precipitation)
        return (
            {
                key: EventStatistics.empty(cases, leads, events, regions, own)
                for key, own in members.items()
                if events and key != "climatology"
            },
            {key: SeepsSums.empty(cases, leads, rain, regions, own) for key, own in members.items() if rain},
        )

    def add(
        self,
        part: PartialScores,
        key: str,
        place: tuple[int, int],
        valid: int,
        members_MCHW: np.ndarray,
        truth_CHW: np.ndarray,
        has: Sequence[int],
    ) -> None:
        """Enter one field; of channels that the forecast lacks the sums stay NaN.

        Args:
            part: has the sums.
            key: name of the forecast.
            place: numbers of the case and of the lead time.
            valid: the valid time in minutes.
            members_MCHW: the members' channels, whatever where masked.
            truth_CHW: of all channels that are scored, likewise.
            has: which of these the forecast's channels are.
        """
        if self._limits is None:
            return
        of_events, of_precipitation = self._limits.at(valid)
        members_MCP, truth_CP = (own.reshape(*own.shape[:-2], -1) for own in (members_MCHW, truth_CHW))
        for number, (own, limits) in enumerate(zip(self.events, of_events, strict=True)):
            if own.channel in has and key in part.events:
                members_MP, truth_P = members_MCP[:, has.index(own.channel)], truth_CP[own.channel]
                sign = own.sign
                part.events[key].add(
                    (*place, number), self._means, own.channel, sign * members_MP, sign * truth_P, *limits
                )
        for number, (own, limits) in enumerate(zip(self.precipitation, of_precipitation, strict=True)):
            if own.channel in has:
                members_MP = members_MCP[:, has.index(own.channel)].astype(np.float64) * own.to_mm
                truth_P = truth_CP[own.channel].astype(np.float64) * own.to_mm
                part.seeps[key].add((*place, number), self._means, own.channel, members_MP, truth_P, *limits)

    def facts(self) -> dict[str, str]:
        """Return what the limits rest on, for the files of scores; nothing where nothing is scored."""
        if self._limits is None:
            return {}
        events = "; ".join(f"{own.name}: {own.definition}" for own in self.events)
        return ({"events": events} if events else {}) | {"climate_of_events": self._climate_description}

    def log_unscored(self, seeps: SeepsSums | None) -> None:
        """Say which precipitation has no SEEPS because its climate is nowhere between dry and wet."""
        for number, own in enumerate(self.precipitation):
            if seeps is not None and self._is_known and not (seeps.area[:, :, number] > 0).any():
                logger.warning(
                    "%s: no SEEPS, as no cell of the training period is dry (below 0.25 mm) with a frequency of 0.1 to "
                    "0.85",
                    self._names[own.channel],
                )
