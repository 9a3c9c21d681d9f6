"""Tests of thresholds and climatological probabilities of the training period, and of wrong events."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from credit.calendar import Calendar
from credit.channels import Channel
from credit.config.sections.verification import EventConfig
from credit.data.splits import Split
from credit.errors import ConfigError
from credit.verify.scores import climatological_sample as climate_module
from credit.verify.scores.climatological_sample import ClimatologicalSample
from credit.verify.scores.thresholds import (
    Event,
    Precipitation,
    build_events,
    compute_event_threshold,
    find_precipitation_channels,
    seeps_thresholds,
)
from tests.unit.verify.conftest import make_config

CALENDAR = Calendar()
TRAIN = Split("train", CALENDAR.parse("1990-01-01"), CALENDAR.parse("1999-12-31T18:00"))
TIMES = np.arange(CALENDAR.parse("1989-01-01"), CALENDAR.parse("2001-01-01"), 360)
MARCH = CALENDAR.parse("2000-03-10T06:00")
CHANNELS = [Channel("t2m", "t2m", None, "prognostic"), Channel("tp", "tp", None, "diagnostic")]
ATTRIBUTES = {"t2m": {"units": "K"}, "tp": {"units": "m", "temporal": "accumulate"}}


def make_sample(by_hour: bool = False, field_bytes: int = 8) -> ClimatologicalSample:
    """Return a sample of one cell, whose value is the time in minutes."""
    return ClimatologicalSample(lambda t: np.array([[float(t)]]), TIMES, TRAIN, CALENDAR, by_hour, field_bytes)


def make_event(**limit: float) -> Event:
    return Event.build("e", EventConfig(channel="x", **limit), 0, "K")


def test_a_season_is_two_months_of_all_years_and_every_hour() -> None:
    sample = make_sample()
    times = sample.season_times(sample.season_of(MARCH))
    dates = [CALENDAR.datetime(t) for t in times.tolist()]
    assert 60 <= len(times) <= 75
    assert times.min() >= TRAIN.first
    assert times.max() <= TRAIN.last
    days = np.array([date.dayofyr for date in dates])
    assert days.min() >= 69 - 33
    assert days.max() <= 69 + 33
    assert abs(np.mean(days) - 69) < 4
    assert {date.year for date in dates} == set(range(1990, 2000))
    by_hour = [sum(date.hour == hour for date in dates) for hour in (0, 6, 12, 18)]
    assert min(by_hour) >= 10
    fields = sample.read_season(sample.season_of(MARCH))
    np.testing.assert_array_equal(fields, times.astype(np.float32)[None, :, None])


def test_a_season_goes_across_the_new_year() -> None:
    sample = make_sample()
    times = sample.season_times(sample.season_of(CALENDAR.parse("2000-12-30")))
    assert {CALENDAR.datetime(t).month for t in times.tolist()} == {11, 12, 1}
    assert 60 <= len(times) <= 75
    assert sample.smallest_season(np.array([MARCH, CALENDAR.parse("2000-12-30")]))[0] >= 60


def test_seasons_of_one_hour_have_as_many_times() -> None:
    sample = make_sample(by_hour=True)
    times = sample.season_times(sample.season_of(MARCH))
    assert 60 <= len(times) <= 75
    assert {t % 1440 for t in times.tolist()} == {360}


def test_large_fields_have_fewer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climate_module, "_CACHE_BYTES", 40 * 1000)
    sample = make_sample(field_bytes=1000)
    assert len(sample.season_times(sample.season_of(MARCH))) == 40


@pytest.mark.parametrize("count", [40, 99, 400])
def test_thresholds_of_a_known_distribution(count: int) -> None:
    """The quantile q of the numbers 1 to n is 1 + q (n - 1); a share of 1 - q lies above it, to one number."""
    values = np.random.default_rng(0).permuted(np.arange(1.0, count + 1)[:, None] * np.ones(3), axis=0)
    for side, sign, share in (("above", 1, 0.1), ("below", -1, 0.9)):
        threshold, probability = compute_event_threshold(
            make_event(**{f"{side}_quantile": 0.9}), values.astype(np.float32)
        )
        np.testing.assert_allclose(threshold, sign * (1 + 0.9 * (count - 1)), rtol=1e-6)
        np.testing.assert_allclose(probability, share, atol=1.01 / count)
    threshold, probability = compute_event_threshold(make_event(below=11.0), values)
    assert threshold.tolist() == [-11.0]
    assert probability.tolist() == [10 / count] * 3
    dry = compute_event_threshold(make_event(above_quantile=0.5), np.zeros((count, 2)))
    assert dry[1].tolist() == [0.0, 0.0]  # No value is above the median, because all are equal.


@pytest.mark.parametrize("limit", [0.1, 273.15, 0.3])
def test_a_value_equal_to_the_rounded_limit_is_not_beyond_it(limit: float) -> None:
    """Fields are float32, in which 0.1 is a little more and 273.15 a little less than in float64."""
    values = np.array([[limit]], dtype=np.float32)
    for event in (make_event(above=limit), make_event(below=limit)):
        threshold, probability = compute_event_threshold(event, values)
        assert not (event.sign * values[0] > threshold).any()
        assert probability == 0
    assert make_event(above=limit).definition == f"x above {limit:g} K"


def test_seeps_thresholds_equal_quantiles_of_numpy() -> None:
    rng = np.random.default_rng(1)
    values = np.maximum(rng.gamma(0.7, 4.0, (90, 50)) - rng.uniform(0, 4, 50), 0.0)
    values[:, 0] = 0.0
    values[:-1, 1] = 0.0
    values[-1, 1] = 3.0
    dry, heavy = seeps_thresholds(values)
    for cell in range(1, 50):
        wet = values[values[:, cell] >= 0.25, cell]
        assert dry[cell] == pytest.approx(1 - len(wet) / 90)
        assert heavy[cell] == pytest.approx(np.quantile(wet, 2 / 3), rel=1e-12)
    assert dry[0] == 1
    assert np.isnan(heavy[0])
    assert heavy[1] == 3.0


def test_precipitation_channels_are_found_by_unit_and_name() -> None:
    assert find_precipitation_channels(None, CHANNELS, ATTRIBUTES) == [Precipitation(1, 1000.0)]
    mean_attributes = {"tp": {"units": "mm"}}
    attributes_with_standard_name = {
        "t2m": {"units": "kg m-2", "temporal": "accumulate", "standard_name": "precipitation_amount"}
    } | mean_attributes
    assert find_precipitation_channels(None, CHANNELS, attributes_with_standard_name) == [Precipitation(0, 1.0)]
    assert find_precipitation_channels([], CHANNELS, ATTRIBUTES) == []
    assert find_precipitation_channels(["tp"], CHANNELS, ATTRIBUTES) == [Precipitation(1, 1000.0)]
    for requested, attributes, message in (
        ("tpp", ATTRIBUTES, 'verification.seeps: "tpp" is not scored; did you mean "tp"?'),
        ("tp", mean_attributes, "tp is not a sum over the step .data.variable_options.tp.temporal"),
        ("tp", {"tp": {"units": "K", "temporal": "accumulate"}}, 'tp is in "K", but SEEPS needs one of mm'),
    ):
        with pytest.raises(ConfigError, match=message):
            find_precipitation_channels([requested], CHANNELS, attributes)


def test_an_event_of_a_channel_that_is_not_scored_is_refused() -> None:
    conf = {"warm": EventConfig(channel="t2n", above=300)}
    with pytest.raises(ConfigError, match='events.warm.channel: "t2n" is not scored; did you mean "t2m"?'):
        build_events(conf, CHANNELS, ATTRIBUTES)
    (event,) = build_events({"dry": EventConfig(channel="tp", below=1e-3)}, CHANNELS, ATTRIBUTES)
    assert event.channel == 1
    assert event.definition == "tp below 0.001 m"


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({}, "verification.events.e: has no limit; an event has exactly one of above, below, above_quantile"),
        ({"above": 1, "below_quantile": 0.1}, "has above and below_quantile; an event has exactly one"),
        ({"above_quantile": 90}, "above_quantile: 90 is not between 0 and 1; the ninetieth percentile is 0.9"),
        ({"below_quantile": 0.0}, "below_quantile: 0 is not between 0 and 1"),
        ({"over": 1.0}, "over"),
    ],
)
def test_wrong_limits_of_events_are_refused(tmp_path: Path, event: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path, events={"e": {"channel": "t2m", **event}})


def test_event_names_with_spaces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='events: "heavy rain" becomes part of the names of scores'):
        make_config(tmp_path, events={"heavy rain": {"channel": "tp", "above": 10}})
