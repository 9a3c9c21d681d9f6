"""Variables of the score table for events and SEEPS.

Shapes: N cases, L lead times, E events, C channels of the table, R regions, K forecast probabilities, B points of a
reliability diagram.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from credit.channels import Channel
from credit.verify.scores.events import EventStatistics
from credit.verify.scores.reliability import OBSERVED_FREQUENCY, POINT_NAMES, ReliabilityStatistics
from credit.verify.scores.seeps import SeepsStatistics
from credit.verify.scores.thresholds import Event, Precipitation
from credit.verify.significance.bootstrap import compute_seasonal_scores, interval_names
from credit.verify.significance.comparison import compare_with_references
from credit.verify.table.table import EVENT_METRICS, SEEPS

# Name of a variable of scores.nc -> its dimensions and values.
Variables = dict[str, tuple[tuple[str, ...], np.ndarray]]


@dataclass(frozen=True)
class EventResults:
    """Statistics of events and SEEPS, from which their scores are computed.

    Attributes:
        events: the scored events.
        event_statistics: name of each forecast and baseline -> its statistics of these events. The climatology has no
            entry; its statistics follow from those of the model.
        precipitation: the channels for which SEEPS is computed.
        seeps_statistics: name of each forecast and baseline -> its SEEPS statistics of these channels.
    """

    events: Sequence[Event] = ()
    event_statistics: Mapping[str, EventStatistics] = field(default_factory=dict)
    precipitation: Sequence[Precipitation] = ()
    seeps_statistics: Mapping[str, SeepsStatistics] = field(default_factory=dict)

    def variables(
        self, forecasts: Sequence[str], num_channels: int, leads: np.ndarray, seasons: Mapping[str, np.ndarray]
    ) -> Variables:
        """Return the variables of scores.nc for events and SEEPS.

        They are `EVENT_METRICS` with the dimension event, ``seeps`` with the dimension channel, their intervals, and
        the reliability diagrams.

        Args:
            forecasts: names of the forecasts and baselines of the table.
            num_channels: number C of channels of the table.
            leads: (L,) lead times in minutes.
            seasons: season name -> (N,) bool, True for the cases of the season.
        """
        variables: Variables = {}
        # Scores of the events, then their reliability diagrams.
        if self.events:
            dims = ("forecast", "season", "event", "lead", "region")
            scores = compute_seasonal_scores(
                self._statistics_with_climatology(), forecasts, EVENT_METRICS, len(self.events), leads, seasons
            )
            for name, values in scores.items():
                variables[name] = (dims, values)
            variables |= self._build_diagram(forecasts)
            variables |= self._diagram_points(forecasts, leads)
        if self.precipitation:
            dims = ("forecast", "season", "channel", "lead", "region")
            rows = [precipitation.channel for precipitation in self.precipitation]
            statistics = {}
            for name, seeps in self.seeps_statistics.items():
                statistics[name] = (seeps, rows)
            scores = compute_seasonal_scores(statistics, forecasts, (SEEPS,), num_channels, leads, seasons)
            # In a climate that is too dry or too wet everywhere there is no score, and so no variable.
            if np.isfinite(scores[SEEPS]).any():
                for name, values in scores.items():
                    variables[name] = (dims, values)
        return variables

    def compare(
        self, forecasts: Sequence[str], num_channels: int, leads: np.ndarray, seasons: Mapping[str, np.ndarray]
    ) -> dict[str, tuple[str, dict[str, np.ndarray]]]:
        """Return the comparison of the model with every reference by the Brier score and by SEEPS.

        The Brier skill score is not compared. It is measured against the same climatology for all forecasts, so its
        differences have the same significance as those of the Brier score.

        SEEPS is the mean penalty divided by the mean area. The area depends only on the climate and is the same for all
        forecasts, so the penalties of single cases can be compared instead of the scores.

        Args:
            forecasts, num_channels, leads, seasons: see `variables`.

        Returns:
            ``brier`` and ``seeps``, if they are scored -> (dimension of the rows, result of
            `credit.verify.significance.comparison.compare_with_references`). The dimension is "event" for the Brier
            score and "channel" for SEEPS.
        """
        comparisons = {}
        if self.events:
            with_climatology = self._statistics_with_climatology()
            statistics = {name: with_climatology[name] for name in forecasts}
            # The contribution of a case to the Brier score is its own Brier score.
            brier = compare_with_references(
                statistics, seasons, leads, lambda cases, is_selected: cases.brier[is_selected]
            )
            comparisons["brier"] = "event", brier
        if self.precipitation:
            # The statistics have a row for each channel of SEEPS, the table one for each channel.
            rows = list(range(len(self.precipitation)))
            statistics = {name: (self.seeps_statistics[name], rows) for name in forecasts}
            results = compare_with_references(statistics, seasons, leads, _seeps_of_cases)
            if np.isfinite(results["difference"]).any():
                by_channel = {}
                for name, values in results.items():
                    by_channel[name] = self._to_channels(values, num_channels)
                comparisons[SEEPS] = "channel", by_channel
        return comparisons

    def compare_fair(
        self, forecasts: Sequence[str], leads: np.ndarray, seasons: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray] | None:
        """Return the comparison of the model with every reference by the fair Brier score, with events as rows.

        The fair score makes ensembles of different sizes comparable. For equal sizes it gives the same result as the
        Brier score, so it is not a row of the scorecard. Single forecasts have no fair score, so the climatology is the
        only opponent among the baselines.

        Args:
            forecasts, leads, seasons: see `variables`.

        Returns:
            The results of `credit.verify.significance.comparison.compare_with_references`; None if there are no events,
            or if the model is a single forecast.
        """
        if not self.events or self.event_statistics["model"].num_members == 1:
            return None
        with_climatology = self._statistics_with_climatology()
        statistics = {name: with_climatology[name] for name in forecasts}
        return compare_with_references(
            statistics, seasons, leads, lambda cases, is_selected: cases.brier_fair[is_selected]
        )

    def coordinates(self, channels: Sequence[Channel]) -> dict[str, tuple[str, list] | list[str]]:
        """Return the coordinates of the dimension ``event``, by name; empty without events.

        Args:
            channels: the scored channels; `channel` of an event is an index into them.
        """
        if not self.events:
            return {}
        names = []
        definitions = []
        channel_names = []
        variables = []
        levels = []
        for event in self.events:
            channel = channels[event.channel]
            names.append(event.name)
            definitions.append(event.definition)
            channel_names.append(channel.name)
            variables.append(channel.variable)
            # The level of a channel without a level is NaN, because the array holds numbers.
            level = np.nan if channel.level is None else channel.level
            levels.append(level)
        return {
            "event": names,
            "event_definition": ("event", definitions),
            "event_channel": ("event", channel_names),
            "event_variable": ("event", variables),
            "event_level": ("event", np.array(levels, dtype=np.float64)),
            # Scores of events are dimensionless.
            "event_units": ("event", ["1"] * len(names)),
        }

    def _statistics_with_climatology(self) -> dict[str, tuple[EventStatistics, Sequence[int]]]:
        """Return name of each forecast and baseline, climatology included -> (statistics, indices of all events)."""
        # The climatology forecasts the climatological probability. Its mean field would never forecast a rare event.
        # All forecasts have the same climatological probability, so it is taken from the model.
        climatology = self.event_statistics["model"].of_climatology()
        statistics = {**self.event_statistics, "climatology": climatology}
        return {name: (events, range(len(self.events))) for name, events in statistics.items()}

    def _to_channels(self, values: np.ndarray, num_channels: int) -> np.ndarray:
        """Return values of the SEEPS channels as values of all C channels, NaN for channels without SEEPS.

        Args:
            values: (references, seasons, SEEPS channels, L, R) values.
            num_channels: number C of channels of the table.

        Returns:
            (references, seasons, C, L, R) values.
        """
        by_channel = np.full((*values.shape[:2], num_channels, *values.shape[3:]), np.nan)
        rows = [precipitation.channel for precipitation in self.precipitation]
        by_channel[:, :, rows] = values
        return by_channel

    def _build_diagram(self, forecasts: Sequence[str]) -> Variables:
        """Return the variables ``forecast_frequency`` and ``observed_frequency`` of each forecast probability.

        They are over all cases. Ensembles with fewer members than the largest one have NaN at the last probabilities.

        Args:
            forecasts: names of the forecasts and baselines of the table.
        """
        most_members = max(events.num_members for events in self.event_statistics.values())
        num_probabilities = most_members + 1
        _, num_leads, num_events, num_regions = self.event_statistics["model"].brier.shape
        shape = len(forecasts), num_events, num_leads, num_regions, num_probabilities
        forecast_frequency = np.full(shape, np.nan)
        observed_frequency = np.full(shape, np.nan)
        # The climatology has no diagram. An ensemble fills as many probabilities as it has.
        for f, name in enumerate(forecasts):
            if name not in self.event_statistics:
                continue
            forecast_LERK, observed_LERK = self.event_statistics[name].diagram()
            probabilities = slice(forecast_LERK.shape[-1])
            # The table has the events before the lead times.
            forecast_frequency[f, ..., probabilities] = np.moveaxis(forecast_LERK, 1, 0)
            observed_frequency[f, ..., probabilities] = np.moveaxis(observed_LERK, 1, 0)
        dims = ("forecast", "event", "lead", "region", "members_beyond")
        return {
            "forecast_frequency": (dims, forecast_frequency),
            "observed_frequency": (dims, observed_frequency),
        }

    def _diagram_points(self, forecasts: Sequence[str], leads: np.ndarray) -> Variables:
        """Return the points of the reliability diagrams as figures show them, with the intervals of the observations.

        Forecasts with fewer points than others have NaN at the last points.

        Args:
            forecasts: names of the forecasts and baselines of the table.
            leads: (L,) lead times in minutes.
        """
        statistics = {}
        for name, events in self.event_statistics.items():
            statistics[name] = ReliabilityStatistics.build(events)
        num_events = len(self.events)
        num_regions = self.event_statistics["model"].brier.shape[-1]
        # The third dimension of the statistics has the points of all events.
        num_points = max(points.frequency.shape[2] for points in statistics.values()) // num_events
        shape = len(forecasts), num_events, len(leads), num_regions, num_points
        low_name, high_name = interval_names([OBSERVED_FREQUENCY])
        arrays = {name: np.full(shape, np.nan) for name in (*POINT_NAMES, low_name, high_name)}
        # Statistics have the points of all events in one dimension, the table has two.
        for forecast, points in statistics.items():
            low, high = points.observed_intervals(leads)
            values_by_name = {**points.metrics(), low_name: low, high_name: high}
            for name, values in values_by_name.items():
                values_LEBR = values.reshape(len(leads), num_events, -1, num_regions)
                values_ELRB = np.moveaxis(values_LEBR, (0, 2), (1, 3))
                f = forecasts.index(forecast)
                arrays[name][f, ..., : values_ELRB.shape[-1]] = values_ELRB
        dims = ("forecast", "event", "lead", "region", "point")
        return {name: (dims, values) for name, values in arrays.items()}


def _seeps_of_cases(statistics: SeepsStatistics, is_selected: np.ndarray) -> np.ndarray:
    """Return the penalty of each selected case divided by the mean area of these cases.

    The mean over the cases is SEEPS.

    Args:
        statistics: SEEPS statistics of N cases.
        is_selected: (N,) bool, True for the selected cases.

    Returns:
        (selected cases, L, SEEPS channels, R).
    """
    with np.errstate(invalid="ignore"):
        return statistics.penalty[is_selected] / statistics.area[is_selected].mean(axis=0)
