"""Limits: thresholds and climatological probabilities at each cell, of events and of SEEPS's categories.

Shapes: E events, S channels of precipitation, P cells.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from credit.calendar import Calendar
from credit.channels import Channel
from credit.config.schema_verification import EventConfig
from credit.data.formats.units import plain
from credit.errors import ConfigError, did_you_mean
from credit.verify.scores.climatological_sample import LEAST_TIMES, WITHIN_DAYS, ClimatologicalSample, Season
from credit.verify.scores.seeps import DRY_BELOW_MM

logger = logging.getLogger(__name__)

_MM = {"mm": 1.0, "kg m-2": 1.0, "cm": 10.0, "m": 1000.0}
# what precipitation is called
_NAMES = ("tp", "total_precipitation")
_STANDARD_NAMES = ("precipitation_amount", "lwe_thickness_of_precipitation_amount")

_SIDES = {1: "above", -1: "below"}
Limit = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Event:
    """An event that is scored.

    Attributes:
        name: of ``verification.events``.
        channel: number of its channel among those that are scored.
        sign: 1 of values above the limit, -1 of values below.
        threshold: the limit in the units of the data with the digits of fields, which are float32, so that a value that
            was rounded to it equals it; None where it is a quantile.
        quantile: the limit as a quantile of the climate, None where it is a number.
        definition: it in words.
    """

    name: str
    channel: int
    sign: int
    threshold: float | None
    quantile: float | None
    definition: str

    @classmethod
    def build(cls, name: str, conf: EventConfig, channel: int, units: str) -> Event:
        """Return the event of a config."""
        sign = -1 if conf.above is None and conf.above_quantile is None else 1
        threshold = conf.below if conf.above is None else conf.above
        quantile = conf.below_quantile if conf.above_quantile is None else conf.above_quantile
        limit = f"quantile {quantile:g} of its season" if threshold is None else f"{threshold:g} {units}".rstrip()
        threshold = None if threshold is None else float(np.float32(threshold))
        return cls(name, channel, sign, threshold, quantile, f"{conf.channel} {_SIDES[sign]} {limit}")


@dataclass(frozen=True)
class Precipitation:
    """A channel of accumulated precipitation.

    Attributes:
        channel: its number among those that are scored.
        to_mm: factor from its units to mm.
    """

    channel: int
    to_mm: float


def find_events(
    conf: Mapping[str, EventConfig], channels: Sequence[Channel], attributes: Mapping[str, Mapping[str, str]]
) -> list[Event]:
    """Return the events of ``verification.events``.

    Raises:
        ConfigError: if the channel of one is not scored.
    """
    names = [channel.name for channel in channels]
    for name, own in conf.items():
        if own.channel not in names:
            where = f'verification.events.{name}.channel: "{own.channel}"'
            raise ConfigError(f"{where} is not scored{did_you_mean(own.channel, names)}")
    events = []
    for name, own in conf.items():
        number = names.index(own.channel)
        units = str(attributes.get(channels[number].variable, {}).get("units", ""))
        events.append(Event.build(name, own, number, units))
    return events


def find_precipitation(
    wanted: Sequence[str] | None, channels: Sequence[Channel], attributes: Mapping[str, Mapping[str, str]]
) -> list[Precipitation]:
    """Return the channels that SEEPS is of: ``verification.seeps``, else what is called precipitation.

    Raises:
        ConfigError: if one that is asked for is not scored, is no sum over the step, or not in units of depth.
    """
    names = [channel.name for channel in channels]
    for name in wanted or ():
        if name not in names:
            raise ConfigError(f'verification.seeps: "{name}" is not scored{did_you_mean(name, names)}')
    found = []
    for number, channel in enumerate(channels):
        own = attributes.get(channel.variable, {})
        units = plain(str(own.get("units", "")))
        is_sum = own.get("temporal") == "accumulate"
        if wanted is None:
            named = channel.variable in _NAMES or own.get("standard_name") in _STANDARD_NAMES
            if not (named and is_sum and units in _MM):
                continue
        elif channel.name not in wanted:
            continue
        elif not is_sum:
            raise ConfigError(
                f"verification.seeps: {channel.name} is no sum over the step "
                f"(data.variable_options.{channel.variable}.temporal: "
                "accumulate or deaccumulate), and SEEPS is not for rates at a time; leave it out"
            )
        elif units not in _MM:
            raise ConfigError(
                f'verification.seeps: {channel.name} is in "{units}", but SEEPS needs one of {", ".join(_MM)}; set '
                f"data.variable_options.{channel.variable}.units"
            )
        found.append(Precipitation(number, _MM[units]))
    return found


def require_climate(
    events: Sequence[Event], climate: ClimatologicalSample, valid_times: np.ndarray, period: str, calendar: Calendar
) -> bool:
    """Return whether the climate is known at every valid time.

    Args:
        events: those that are scored.
        climate: of the training period.
        valid_times: in minutes.
        period: names the training period.
        calendar: of the times.

    Raises:
        ConfigError: if it is not, and the threshold of an event is a quantile of it.
    """
    count, minutes = climate.fewest(valid_times)
    if count >= LEAST_TIMES:
        return True
    has = f"{period} has {count} times within {WITHIN_DAYS} days of the time of the year of {calendar.format(minutes)}"
    for event in events:
        if event.quantile is not None:
            side = _SIDES[event.sign]
            raise ConfigError(
                f"verification.events.{event.name}.{side}_quantile: {event.quantile:g} is a quantile of the "
                f"training period, but {has}, which is scored, and {LEAST_TIMES} are needed: lengthen "
                f"data.splits.train, or give {side} in the units of the data"
            )
    logger.warning("%s, fewer than %d: no climate, hence no Brier skill and no SEEPS", has, LEAST_TIMES)
    return False


class EventThresholds:
    """What the climate of a valid time says of events and of precipitation.

    Args:
        events: those that are scored.
        precipitation: channels of SEEPS.
        climate: of the channels `places`; None where it is not known.
        places: number of a channel among those that are scored -> among those of the climate.
        cells: P.
        kept: how many seasons are kept, those that forecasts side by side go through.
    """

    def __init__(
        self,
        events: Sequence[Event],
        precipitation: Sequence[Precipitation],
        climate: ClimatologicalSample | None,
        places: Mapping[int, int],
        cells: int,
        kept: int,
    ) -> None:
        self._events, self._precipitation = events, precipitation
        self._climate, self._places, self._cells = climate, places, cells
        self._of_season = lru_cache(maxsize=kept)(self._find)

    def at(self, minutes: int) -> tuple[list[Limit], list[Limit]]:
        """Return the limits at a valid time.

        Returns:
            (threshold, climatological probability) of each event, and (probability of dry, what is heavy in mm) of each
            channel of precipitation; (P,) or, where it is the same everywhere, (1,). Thresholds of events "below" have
            the other sign, as their values are to have. NaN where the climate is not known.
        """
        return self._of_season(None if self._climate is None else self._climate.season(minutes))

    def _find(self, season: Season | None) -> tuple[list[Limit], list[Limit]]:
        if self._climate is None or season is None:
            unknown = np.full(self._cells, np.nan)
            events = [(np.array([own.sign * own.threshold]), unknown) for own in self._events]
            return events, [(unknown, unknown) for _ in self._precipitation]
        fields_CKP = self._climate.read(season)
        events = [event_limits(own, fields_CKP[self._places[own.channel]]) for own in self._events]
        rain = [(fields_CKP[self._places[own.channel]], own.to_mm) for own in self._precipitation]
        return events, [seeps_thresholds(values.astype(np.float64) * to_mm) for values, to_mm in rain]


def event_limits(event: Event, values_KP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return threshold and climatological probability of an event, given the climate of its channel.

    The probability is how often the climate exceeds the threshold: 1 - q of a quantile q, but less where many values
    are equal, as in dry places.

    Returns:
        (P,) or (1,) threshold, with the sign of the event; (P,) probability.
    """
    if event.quantile is not None:
        threshold = np.quantile(values_KP, event.quantile, axis=0)
    else:
        threshold = np.array([event.threshold])
    threshold = event.sign * threshold.astype(np.float64)
    return threshold, (event.sign * values_KP > threshold).mean(axis=0)


def seeps_thresholds(values_KP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of dry and what a third of the wet values exceed, (P,) each, of precipitation in mm.

    The second is NaN where all is dry. It is the quantile 2/3 of the wet values, linear between the two nearest.
    """
    ordered = np.sort(values_KP, axis=0)
    count = len(ordered)
    dry = (ordered < DRY_BELOW_MM).sum(axis=0)
    wet = count - dry
    position = np.minimum(dry, count - 1) + np.maximum(wet - 1, 0) * (2.0 / 3.0)
    below = np.floor(position).astype(int)
    above = np.minimum(below + 1, count - 1)
    low, high = (np.take_along_axis(ordered, at[None], axis=0)[0] for at in (below, above))
    return dry / count, np.where(wet > 0, low + (high - low) * (position - below), np.nan)
