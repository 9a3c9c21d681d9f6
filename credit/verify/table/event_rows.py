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

# Name of a variable of scores.nc -> (dimensions, values).
Variables = dict[str, tuple[tuple[str, ...], np.ndarray]]


@dataclass(frozen=True)
class EventResults:
    """Statistics of events and SEEPS, from which the variables of the score table are computed.

    Attributes:
        events: the scored events.
        event_statistics: name of each forecast and baseline -> statistics of the events. The climatology has no entry,
            because its statistics are computed from the statistics of the model.
        precipitation: the channels for which SEEPS is computed.
        seeps_statistics: name of each forecast and baseline -> SEEPS statistics of these channels.
    """

    events: Sequence[Event] = ()
    event_statistics: Mapping[str, EventStatistics] = field(default_factory=dict)
    precipitation: Sequence[Precipitation] = ()
    seeps_statistics: Mapping[str, SeepsStatistics] = field(default_factory=dict)

    def variables(
        self, forecasts: Sequence[str], num_channels: int, leads: np.ndarray, seasons: Mapping[str, np.ndarray]
    ) -> Variables:
        """Return the variables of scores.nc for events and SEEPS.

        The variables are `EVENT_METRICS` with the dimension event, ``seeps`` with the dimension channel, the intervals
        of these scores, and the reliability diagrams.

        Args:
            forecasts: names of the forecasts and baselines of the table.
            num_channels: number C of channels of the table.
            leads: (L,) lead times in minutes.
            seasons: season name -> (N,) bool, True for the cases of the season.
        """
        variables: Variables = {}
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
            # If the climate is too dry or too wet in all cells, SEEPS has no variable.
            if np.isfinite(scores[SEEPS]).any():
                for name, values in scores.items():
                    variables[name] = (dims, values)
        return variables

    def compare(
        self, forecasts: Sequence[str], num_channels: int, leads: np.ndarray, seasons: Mapping[str, np.ndarray]
    ) -> dict[str, tuple[str, dict[str, np.ndarray]]]:
        """Return the comparison of the model with every reference by the Brier score and by SEEPS.

        The Brier skill score is not compared. It refers to the same climatology for all forecasts, so its differences
        have the same significance as the differences of the Brier score.

        SEEPS is the mean penalty divided by the mean area. The area depends only on the climate and is the same for all
        forecasts, so the penalties of single cases can be compared instead of the scores.

        Args:
            forecasts: names of the forecasts and baselines of the table.
            num_channels: number C of channels of the table.
            leads: (L,) lead times in minutes.
            seasons: season name -> (N,) bool, True for the cases of the season.

        Returns:
            Name of the score -> (dimension of the rows, result of
            `credit.verify.significance.comparison.compare_with_references`). The names are ``brier`` with the
            dimension "event", and ``seeps`` with the dimension "channel". A score that is not computed is left out.
        """
        comparisons = {}
        if self.events:
            with_climatology = self._statistics_with_climatology()
            statistics = {name: with_climatology[name] for name in forecasts}
            # The contribution of a case to the Brier score is the Brier score of the case.
            brier = compare_with_references(
                statistics, seasons, leads, lambda cases, is_selected: cases.brier[is_selected]
            )
            comparisons["brier"] = "event", brier
        if self.precipitation:
            # The statistics have a row for each SEEPS channel, and the table has a row for each channel.
            rows = list(range(len(self.precipitation)))
            statistics = {name: (self.seeps_statistics[name], rows) for name in forecasts}
            results = compare_with_references(statistics, seasons, leads, _seeps_of_cases)
            if np.isfinite(results["difference"]).any():
                by_channel = {}
                for name, values in results.items():
                    by_channel[name] = self._expand_to_channels(values, num_channels)
                comparisons[SEEPS] = "channel", by_channel
        return comparisons

    def compare_fair(
        self, forecasts: Sequence[str], leads: np.ndarray, seasons: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray] | None:
        """Return the comparison of the model with every reference by the fair Brier score, with events as rows.

        With the fair score, ensembles of different sizes can be compared. For equal sizes, it gives the same result as
        the Brier score, so it is not a row of the scorecard. Single forecasts have no fair score, so the climatology is
        the only opponent among the baselines.

        Args:
            forecasts: names of the forecasts and baselines of the table.
            leads: (L,) lead times in minutes.
            seasons: season name -> (N,) bool, True for the cases of the season.

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
            channels: the scored channels, to which the attribute `channel` of an event refers.
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
            # For a channel without a level, the level is NaN, because the array contains numbers.
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
        """Return name of each forecast and baseline, including climatology -> (statistics, indices of all events)."""
        # The baseline forecasts the climatological probability, because the climatological mean would never forecast a
        # rare event. The statistics of all forecasts contain the same climatological probability.
        climatology = self.event_statistics["model"].of_climatology()
        statistics = {**self.event_statistics, "climatology": climatology}
        return {name: (events, range(len(self.events))) for name, events in statistics.items()}

    def _expand_to_channels(self, values: np.ndarray, num_channels: int) -> np.ndarray:
        """Expand values of the SEEPS channels to all C channels, with NaN for channels without SEEPS.

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

        The frequencies are over all cases. For ensembles with fewer members than the largest ensemble, the values at
        the last probabilities are NaN.

        Args:
            forecasts: names of the forecasts and baselines of the table.
        """
        most_members = max(events.num_members for events in self.event_statistics.values())
        num_probabilities = most_members + 1
        _, num_leads, num_events, num_regions = self.event_statistics["model"].brier.shape
        shape = len(forecasts), num_events, num_leads, num_regions, num_probabilities
        forecast_frequency = np.full(shape, np.nan)
        observed_frequency = np.full(shape, np.nan)
        # The climatology has no diagram. An ensemble with M members has values for the first M + 1 probabilities.
        for f, name in enumerate(forecasts):
            if name not in self.event_statistics:
                continue
            forecast_LERK, observed_LERK = self.event_statistics[name].diagram()
            probabilities = slice(forecast_LERK.shape[-1])
            # In the table, the dimension of the events precedes the dimension of the lead times.
            forecast_frequency[f, ..., probabilities] = np.moveaxis(forecast_LERK, 1, 0)
            observed_frequency[f, ..., probabilities] = np.moveaxis(observed_LERK, 1, 0)
        dims = ("forecast", "event", "lead", "region", "members_beyond")
        return {
            "forecast_frequency": (dims, forecast_frequency),
            "observed_frequency": (dims, observed_frequency),
        }

    def _diagram_points(self, forecasts: Sequence[str], leads: np.ndarray) -> Variables:
        """Return the points of the reliability diagrams for figures, with intervals of the observed frequencies.

        For forecasts with fewer points than other forecasts, the last points are NaN.

        Args:
            forecasts: names of the forecasts and baselines of the table.
            leads: (L,) lead times in minutes.
        """
        statistics = {}
        for name, events in self.event_statistics.items():
            statistics[name] = ReliabilityStatistics.build(events)
        num_events = len(self.events)
        num_regions = self.event_statistics["model"].brier.shape[-1]
        # The third dimension of the statistics contains the points of all events.
        num_points = max(points.frequency.shape[2] for points in statistics.values()) // num_events
        shape = len(forecasts), num_events, len(leads), num_regions, num_points
        low_name, high_name = interval_names([OBSERVED_FREQUENCY])
        arrays = {name: np.full(shape, np.nan) for name in (*POINT_NAMES, low_name, high_name)}
        # In the statistics, events and points share one dimension; in the table, they are two dimensions.
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
    """Return the contribution of each selected case to SEEPS: its penalty divided by the mean area of these cases.

    The mean of the contributions is SEEPS.

    Args:
        statistics: SEEPS statistics of N cases.
        is_selected: (N,) bool, True for the selected cases.

    Returns:
        (selected cases, L, SEEPS channels, R).
    """
    with np.errstate(invalid="ignore"):
        return statistics.penalty[is_selected] / statistics.area[is_selected].mean(axis=0)
