"""Thresholds and climatological probabilities of each cell, for events and for the categories of SEEPS.

Thresholds and probabilities are computed from a sample of the training period for each five-day season of the year, see
`credit.verify.scores.climatological_sample`.

Shapes: C channels, K times in the sample of a season, H x W = P cells.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from credit.calendar import Calendar
from credit.channels import Channel
from credit.config.sections.verification import EventConfig
from credit.data.formats.units import normalise_units
from credit.errors import ConfigError, did_you_mean
from credit.verify.scores.climatological_sample import MIN_TIMES, WITHIN_DAYS, ClimatologicalSample, Season
from credit.verify.scores.seeps import DRY_BELOW_MM

logger = logging.getLogger(__name__)

# Units of accumulated precipitation -> factor to mm; 1 kg m-2 of water is 1 mm deep.
_MM_PER_UNIT = {"mm": 1.0, "kg m-2": 1.0, "cm": 10.0, "m": 1000.0}
# Names of variables that are accumulated precipitation.
_PRECIPITATION_NAMES = ("tp", "total_precipitation")
_PRECIPITATION_STANDARD_NAMES = ("precipitation_amount", "lwe_thickness_of_precipitation_amount")

# Sign of an event -> side of the threshold in words.
_SIDES = {1: "above", -1: "below"}
# (threshold, climatological probability) of an event, or (probability of dry, threshold of heavy precipitation in mm).
ThresholdPair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Event:
    """Event that is scored: a channel is above or below a threshold.

    Attributes:
        name: key of the event in ``verification.events``.
        channel: index of the channel of the event among the scored channels.
        sign: 1 if the event is a value above the threshold, -1 if it is a value below it.
        threshold: threshold in the units of the data; None if `quantile` defines the threshold. The threshold is
            rounded to float32 like the fields, so that a field value equal to the threshold is not above it.
        quantile: quantile of the climate (0 to 1) that defines the threshold; None if `threshold` is given.
        definition: definition of the event in words, such as "t2m above 300 K".
    """

    name: str
    channel: int
    sign: int
    threshold: float | None
    quantile: float | None
    definition: str

    @classmethod
    def build(cls, name: str, config: EventConfig, channel: int, units: str) -> Event:
        """Build the event that a config section defines.

        Args:
            name: key of the event in ``verification.events``.
            config: config section of the event.
            channel: index of the channel of the event among the scored channels.
            units: units of the channel, for the definition in words.
        """
        # The config has exactly one of the four keys.
        if config.above is None and config.above_quantile is None:
            sign = -1
            threshold = config.below
            quantile = config.below_quantile
        else:
            sign = 1
            threshold = config.above
            quantile = config.above_quantile
        if threshold is None:
            limit = f"quantile {quantile:g} of its season"
        else:
            # The definition contains the number in the config; the threshold is rounded after that.
            limit = f"{threshold:g} {units}".rstrip()
            threshold = float(np.float32(threshold))
        return cls(name, channel, sign, threshold, quantile, f"{config.channel} {_SIDES[sign]} {limit}")


@dataclass(frozen=True)
class Precipitation:
    """Channel with accumulated precipitation for which SEEPS is computed.

    Attributes:
        channel: index of the channel among the scored channels.
        to_mm: factor from the units of the channel to mm.
    """

    channel: int
    to_mm: float


def build_events(
    events: Mapping[str, EventConfig], channels: Sequence[Channel], attributes: Mapping[str, Mapping[str, str]]
) -> list[Event]:
    """Build the events of ``verification.events``.

    Args:
        events: event name -> config section of the event.
        channels: the scored channels.
        attributes: variable -> attributes of the variable; only ``units`` is used.

    Raises:
        ConfigError: if the channel of an event is not scored.
    """
    names = [channel.name for channel in channels]
    scored_events = []
    for name, config in events.items():
        if config.channel not in names:
            key = f'verification.events.{name}.channel: "{config.channel}"'
            raise ConfigError(f"{key} is not scored{did_you_mean(config.channel, names)}")
        index = names.index(config.channel)
        units = str(attributes.get(channels[index].variable, {}).get("units", ""))
        scored_events.append(Event.build(name, config, index, units))
    return scored_events


def find_precipitation_channels(
    requested: Sequence[str] | None, channels: Sequence[Channel], attributes: Mapping[str, Mapping[str, str]]
) -> list[Precipitation]:
    """Return the channels for which SEEPS is computed.

    Args:
        requested: channel names of ``verification.seeps``. With None, SEEPS is computed for all channels of accumulated
            precipitation; they are recognised by their names, attributes and units.
        channels: the scored channels.
        attributes: variable -> attributes of the variable; ``units``, ``standard_name`` and ``temporal`` are used.

    Raises:
        ConfigError: if a requested channel is not scored, is not a sum over the time step, or has units that are not a
            depth of water.
    """
    # A requested channel that is not scored is an error.
    names = [channel.name for channel in channels]
    for name in requested or ():
        if name not in names:
            raise ConfigError(f'verification.seeps: "{name}" is not scored{did_you_mean(name, names)}')
    precipitation = []
    for index, channel in enumerate(channels):
        variable_attributes = attributes.get(channel.variable, {})
        units = normalise_units(str(variable_attributes.get("units", "")))
        is_sum = variable_attributes.get("temporal") == "accumulate"
        # With `requested` None, unsuitable channels are left out; a requested channel that is unsuitable is an error.
        if requested is None:
            standard_name = variable_attributes.get("standard_name")
            is_precipitation = (
                channel.variable in _PRECIPITATION_NAMES or standard_name in _PRECIPITATION_STANDARD_NAMES
            )
            if not (is_precipitation and is_sum and units in _MM_PER_UNIT):
                continue
        elif channel.name not in requested:
            continue
        elif not is_sum:
            raise ConfigError(
                f"verification.seeps: {channel.name} is not a sum over the step "
                f"(data.variable_options.{channel.variable}"
                ".temporal: accumulate or deaccumulate), and SEEPS is not defined for rates at a time; leave it out"
            )
        elif units not in _MM_PER_UNIT:
            raise ConfigError(
                f'verification.seeps: {channel.name} is in "{units}", but SEEPS needs one of '
                f"{', '.join(_MM_PER_UNIT)}; set data.variable_options.{channel.variable}.units"
            )
        precipitation.append(Precipitation(index, _MM_PER_UNIT[units]))
    return precipitation


def has_enough_climate_times(
    events: Sequence[Event], climate: ClimatologicalSample, valid_times: np.ndarray, period: str, calendar: Calendar
) -> bool:
    """Return True if the training period has enough times to estimate the climate at every valid time.

    Log a warning if it has too few times. Events with a fixed threshold are then scored without a skill score.

    Args:
        events: the scored events.
        climate: sample of the training period.
        valid_times: valid times in minutes, a one-dimensional array.
        period: description of the training period, for messages.
        calendar: calendar of the times.

    Raises:
        ConfigError: if there are too few times and the threshold of an event is a quantile of the climate.
    """
    num_times, minutes = climate.smallest_season(valid_times)
    if num_times >= MIN_TIMES:
        return True
    # A quantile cannot be computed from too few times. Other events are scored without a skill score.
    reason = (
        f"{period} has {num_times} times within {WITHIN_DAYS} days of the time of the year of "
        f"{calendar.format(minutes)}"
    )
    for event in events:
        if event.quantile is not None:
            side = _SIDES[event.sign]
            raise ConfigError(
                f"verification.events.{event.name}.{side}_quantile: {event.quantile:g} is a quantile of the "
                f"training period, but {reason}, which is scored, and {MIN_TIMES} are needed: lengthen "
                f"data.splits.train, or give {side} in the units of the data"
            )
    logger.warning("%s, fewer than %d: Brier skill and SEEPS are not computed", reason, MIN_TIMES)
    return False


class EventThresholds:
    """Thresholds and climatological probabilities of events and of precipitation at any valid time.

    Args:
        events: the scored events.
        precipitation: channels for which SEEPS is computed.
        climate: sample of the training period; None if the period is too short.
        climate_index: index of a channel among the scored channels -> index of the channel in `climate`.
        cells: number P of cells.
        cached_seasons: number of seasons whose thresholds are cached. The cache must be large enough for the valid
            times of all forecasts of a group, because these forecasts are scored together.
    """

    def __init__(
        self,
        events: Sequence[Event],
        precipitation: Sequence[Precipitation],
        climate: ClimatologicalSample | None,
        climate_index: Mapping[int, int],
        cells: int,
        cached_seasons: int,
    ) -> None:
        self._events = events
        self._precipitation = precipitation
        self._climate = climate
        self._climate_index = climate_index
        self._cells = cells
        self._compute_cached = lru_cache(maxsize=cached_seasons)(self._compute_thresholds)

    def thresholds_at(self, minutes: int) -> tuple[list[ThresholdPair], list[ThresholdPair]]:
        """Return the thresholds and climatological probabilities at a valid time in minutes.

        Returns:
            (thresholds of events, thresholds of SEEPS). The first list contains (threshold, climatological probability)
            of each event. The second list contains (probability of dry, threshold of heavy precipitation in mm) of each
            channel of SEEPS. All arrays are (P,), or (1,) if the value is the same in all cells. For an event "below",
            the threshold is multiplied by -1, and values must also be multiplied by -1 before the comparison. Without a
            climate, all probabilities and the thresholds of SEEPS are NaN.
        """
        if self._climate is None:
            return self._compute_cached(None)
        return self._compute_cached(self._climate.season_of(minutes))

    def _compute_thresholds(self, season: Season | None) -> tuple[list[ThresholdPair], list[ThresholdPair]]:
        """Return the result of `thresholds_at` for a season; the season is None without a climate."""
        # Without a climate, all events have fixed thresholds, and precipitation has no thresholds.
        if self._climate is None or season is None:
            unknown = np.full(self._cells, np.nan)
            event_pairs = []
            for event in self._events:
                event_pairs.append((np.array([event.sign * event.threshold]), unknown))
            return event_pairs, [(unknown, unknown)] * len(self._precipitation)
        fields_CKP = self._climate.read_season(season)
        event_pairs = []
        for event in self._events:
            event_pairs.append(compute_event_threshold(event, fields_CKP[self._climate_index[event.channel]]))
        seeps_pairs = []
        for precipitation in self._precipitation:
            values_KP = fields_CKP[self._climate_index[precipitation.channel]]
            seeps_pairs.append(seeps_thresholds(values_KP.astype(np.float64) * precipitation.to_mm))
        return event_pairs, seeps_pairs


def compute_event_threshold(event: Event, values_KP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the threshold and the climatological probability of an event.

    The probability is the frequency of the event in the sample. For an event above the quantile q, the probability is
    about 1 - q. It is smaller where many values are equal, as for precipitation in dry regions.

    Args:
        event: the event.
        values_KP: sample of the climate of the event's channel, in the units of the data.

    Returns:
        (threshold, probability). The threshold is multiplied by the sign of the event. Its shape is (P,) if it is a
        quantile in each cell, and (1,) if it is a fixed number. The probability is (P,).
    """
    if event.quantile is not None:
        threshold = np.quantile(values_KP, event.quantile, axis=0)
    else:
        threshold = np.array([event.threshold])
    # If values and threshold are multiplied by -1, an event "below" becomes an event above the threshold.
    threshold = event.sign * threshold.astype(np.float64)
    is_event_KP = event.sign * values_KP > threshold
    return threshold, is_event_KP.mean(axis=0)


def seeps_thresholds(values_KP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the climatological probability of dry, and the threshold of heavy precipitation in mm, each (P,).

    The threshold is the linearly interpolated quantile 2/3 of the wet values, so a third of the wet values exceed the
    threshold. The threshold is NaN where all values are dry.

    Args:
        values_KP: sample of the climate of precipitation, in mm.
    """
    # After sorting, the wet values are at the end.
    sorted_KP = np.sort(values_KP, axis=0)
    num_times = len(sorted_KP)
    num_dry_P = (sorted_KP < DRY_BELOW_MM).sum(axis=0)
    num_wet_P = num_times - num_dry_P
    # Fractional index of the quantile 2/3 of the wet values in the sorted values. Where all values are dry, the index
    # is the last one, and the result is replaced with NaN below.
    position_P = np.minimum(num_dry_P, num_times - 1) + np.maximum(num_wet_P - 1, 0) * (2.0 / 3.0)
    lower_index_P = np.floor(position_P).astype(int)
    upper_index_P = np.minimum(lower_index_P + 1, num_times - 1)
    lower_P = np.take_along_axis(sorted_KP, lower_index_P[None], axis=0)[0]
    upper_P = np.take_along_axis(sorted_KP, upper_index_P[None], axis=0)[0]
    heavy_above_P = lower_P + (upper_P - lower_P) * (position_P - lower_index_P)
    return num_dry_P / num_times, np.where(num_wet_P > 0, heavy_above_P, np.nan)
