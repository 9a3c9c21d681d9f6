"""From the sums of events and of SEEPS to their part of the table of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from credit.channels import Channel
from credit.verify.scores.events import EventStatistics
from credit.verify.scores.reliability import OBSERVED, POINTS, ReliabilityStatistics
from credit.verify.scores.seeps import SeepsSums
from credit.verify.scores.thresholds import Event, Precipitation
from credit.verify.significance.bootstrap import ends_of, seasonal_scores
from credit.verify.significance.comparison import compare_all
from credit.verify.table.table import EVENT_METRICS, SEEPS

Variables = dict[str, tuple[tuple[str, ...], np.ndarray]]


@dataclass(frozen=True)
class EventResults:
    """What was found of events and precipitation.

    Attributes:
        events: those that were scored.
        event_sums: forecast -> their sums, of all but the climatology.
        precipitation: the channels that were scored.
        seeps_sums: forecast -> their sums.
    """

    events: Sequence[Event] = ()
    event_sums: Mapping[str, EventStatistics] = field(default_factory=dict)
    precipitation: Sequence[Precipitation] = ()
    seeps_sums: Mapping[str, SeepsSums] = field(default_factory=dict)

    def variables(
        self, forecasts: Sequence[str], channels: int, leads: np.ndarray, seasons: Mapping[str, np.ndarray]
    ) -> Variables:
        """Return the variables of scores.nc: `EVENT_METRICS` over event, ``seeps`` over channel, and the diagram."""
        found: Variables = {}
        if self.events:
            dims = ("forecast", "season", "event", "lead", "region")
            scores = seasonal_scores(self._of_events(), forecasts, EVENT_METRICS, len(self.events), leads, seasons)
            found |= {name: (dims, values) for name, values in scores.items()}
            found |= self._diagram(forecasts) | self._points(forecasts, leads)
        if self.precipitation:
            rows = [own.channel for own in self.precipitation]
            of_rain = {name: (own, rows) for name, own in self.seeps_sums.items()}
            dims = ("forecast", "season", "channel", "lead", "region")
            scores = seasonal_scores(of_rain, forecasts, (SEEPS,), channels, leads, seasons)
            if np.isfinite(scores[SEEPS]).any():
                found |= {name: (dims, values) for name, values in scores.items()}
        return found

    def compare(
        self, forecasts: Sequence[str], channels: int, leads: np.ndarray, seasons: Mapping[str, np.ndarray]
    ) -> dict[str, tuple[str, dict[str, np.ndarray]]]:
        """Return score -> dimension and what `credit.verify.significance.comparison.compare_all` finds.

        Of events that is the Brier score. Their skill is measured against one climatology, so where one differs the
        other does. SEEPS is the mean penalty over the mean area, which is of the climate and the same for all
        forecasts; so differences of the penalties of single cases are those of the score.
        """
        found = {}
        if self.events:
            of_events = self._of_events()
            own = {name: of_events[name] for name in forecasts}
            found["brier"] = "event", compare_all(own, seasons, leads, lambda sums, chosen: sums.brier[chosen])
        if self.precipitation:
            rows = list(range(len(self.precipitation)))
            own = {name: (self.seeps_sums[name], rows) for name in forecasts}
            compared = compare_all(own, seasons, leads, _penalty)
            if np.isfinite(compared["difference"]).any():
                found[SEEPS] = "channel", {name: self._of_channels(own, channels) for name, own in compared.items()}
        return found

    def compare_fair(
        self, forecasts: Sequence[str], leads: np.ndarray, seasons: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray] | None:
        """Return what `credit.verify.significance.comparison.compare_all` finds of the fair Brier score, over events.

        It is for ensembles of different size; of equal size it says what the Brier score says, hence it is no row of
        the scorecard. Single forecasts have none, so of the baselines the climatology is the only opponent. None where
        there are no events, or the model is a single forecast.
        """
        if not self.events or self.event_sums["model"].members == 1:
            return None
        of_events = self._of_events()
        own = {name: of_events[name] for name in forecasts}
        return compare_all(own, seasons, leads, lambda sums, chosen: sums.brier_fair[chosen])

    def coordinates(self, channels: Sequence[Channel]) -> dict[str, tuple[str, list] | list[str]]:
        """Return the coordinates of the dimension event."""
        if not self.events:
            return {}
        own = [channels[event.channel] for event in self.events]
        levels = np.array([np.nan if c.level is None else c.level for c in own], dtype=np.float64)
        return {
            "event": [event.name for event in self.events],
            "event_definition": ("event", [event.definition for event in self.events]),
            "event_channel": ("event", [c.name for c in own]),
            "event_variable": ("event", [c.variable for c in own]),
            "event_level": ("event", levels),
            "event_units": ("event", ["1"] * len(own)),
        }

    def _of_events(self) -> dict[str, tuple[EventStatistics, Sequence[int]]]:
        # the climatology's forecast is its probability; that of its mean would be a forecast of nothing
        sums = {**self.event_sums, "climatology": self.event_sums["model"].of_climatology()}
        return {name: (own, range(len(self.events))) for name, own in sums.items()}

    def _of_channels(self, values: np.ndarray, channels: int) -> np.ndarray:
        """Return (references, seasons, channels, L, R) of values for the channels that are precipitation."""
        whole = np.full((*values.shape[:2], channels, *values.shape[3:]), np.nan)
        whole[:, :, [own.channel for own in self.precipitation]] = values
        return whole

    def _diagram(self, forecasts: Sequence[str]) -> Variables:
        """Return the reliability diagrams of all cases; a smaller ensemble than the largest lacks the last places."""
        most = max(own.members for own in self.event_sums.values()) + 1
        _, leads, events, regions = self.event_sums["model"].brier.shape
        shape = len(forecasts), events, leads, regions, most
        found = {name: np.full(shape, np.nan) for name in ("forecast_frequency", "observed_frequency")}
        for f, forecast in enumerate(forecasts):
            own = self.event_sums.get(forecast)
            for values, diagram in zip(found.values(), own.diagram() if own else (), strict=False):
                values[f, ..., : own.members + 1] = np.moveaxis(diagram, 1, 0)
        dims = ("forecast", "event", "lead", "region", "members_beyond")
        return {name: (dims, values) for name, values in found.items()}

    def _points(self, forecasts: Sequence[str], leads: np.ndarray) -> Variables:
        """Return the diagrams as they are drawn, with intervals; of few members the last points are lacking."""
        sums = {name: ReliabilityStatistics.build(own) for name, own in self.event_sums.items()}
        count, (_, _, _, regions, _) = len(self.events), self.event_sums["model"].forecasts.shape
        most = max(own.frequency.shape[2] for own in sums.values()) // count
        shape = len(forecasts), count, len(leads), regions, most
        found = {name: np.full(shape, np.nan) for name in (*POINTS, *ends_of([OBSERVED]))}
        for name, own in sums.items():
            values = own.metrics() | dict(zip(ends_of([OBSERVED]), own.observed_intervals(leads), strict=True))
            for what, plane in values.items():
                by_event = np.moveaxis(plane.reshape(len(leads), count, -1, regions), (0, 2), (1, 3))
                found[what][forecasts.index(name), ..., : by_event.shape[-1]] = by_event
        dims = ("forecast", "event", "lead", "region", "point")
        return {name: (dims, values) for name, values in found.items()}


def _penalty(sums: SeepsSums, chosen: np.ndarray) -> np.ndarray:
    """Return the penalty of the chosen cases over their mean area, (N, L, C, R), whose mean is SEEPS."""
    with np.errstate(invalid="ignore"):
        return sums.penalty[chosen] / sums.area[chosen].mean(axis=0)
