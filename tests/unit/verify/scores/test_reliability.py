"""Tests of the points of reliability diagrams and their intervals, on events with known frequencies."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from credit.verify.plots.events import plot_reliability_diagrams
from credit.verify.scores.events import EventStatistics
from credit.verify.scores.reliability import OBSERVED_FREQUENCY, POINT_NAMES, ReliabilityStatistics
from credit.verify.significance.bootstrap import MIN_BLOCKS_FOR_INTERVALS
from credit.verify.table.event_rows import EventResults

DAY = 1440
LEADS = np.array([DAY, 40 * DAY])


def draw_event(
    days: int, members: int, chance: np.ndarray, memory: float = 0.0, seed: int = 0, cells: int = 200
) -> EventStatistics:
    """Return the statistics of one event in daily cases, which are equal at both lead times.

    The event occurs with the probability `chance` (M + 1,), by the number of members that forecast it. Deviations from
    this probability are common to all cells of a day; `memory` is their correlation with those of the next day.
    """
    rng = np.random.default_rng(seed)
    forecasts = rng.multinomial(cells, np.full(members + 1, 1 / (members + 1)), size=days) / cells
    weather = np.empty(days)
    weather[0] = rng.standard_normal()
    for day in range(1, days):
        weather[day] = memory * weather[day - 1] + np.sqrt(1 - memory**2) * rng.standard_normal()
    occurrences = forecasts * np.clip(chance + 0.08 * weather[:, None], 0, 1)
    planes = (np.stack([plane, plane], axis=1)[:, :, None, None] for plane in (forecasts, occurrences))
    nothing = np.zeros((days, 2, 1, 1))
    return EventStatistics(DAY * np.arange(days), *planes, nothing, nothing, nothing, num_members=members)


def test_small_ensembles_have_a_point_for_each_probability() -> None:
    """With up to 11 probabilities, each is a point. `test_events.py` tests the diagram itself."""
    events = draw_event(80, 10, np.linspace(0.1, 0.9, 11))
    metrics = ReliabilityStatistics.build(events).metrics()
    shares, observed = events.diagram()
    np.testing.assert_allclose(metrics["diagram_probability"][:, :, 0], np.tile(np.arange(11) / 10, (2, 1)))
    np.testing.assert_allclose(metrics["diagram_frequency"][:, :, 0], shares[:, 0, 0])
    np.testing.assert_allclose(metrics[OBSERVED_FREQUENCY][:, :, 0], observed[:, 0, 0])


def test_points_of_large_ensembles_are_pooled() -> None:
    events = draw_event(40, 50, np.linspace(0.1, 0.9, 51))
    events.forecasts[..., 7] = events.occurrences[..., 7] = 0.0
    p, share, observed = (values[0, :, 0] for values in ReliabilityStatistics.build(events).metrics().values())
    frequency = events.forecasts.mean(axis=0)[0, 0, 0]
    event_frequency = events.occurrences.mean(axis=0)[0, 0, 0]
    assert len(p) == 11
    assert (np.diff(p) > 0).all()
    assert share.sum() == pytest.approx(frequency.sum())
    assert (p * share).sum() == pytest.approx((np.arange(51) / 50 * frequency).sum())
    for point, pooled_counts in enumerate(np.array_split(np.arange(51), np.arange(1, 11) * 51 // 11)):
        assert observed[point] == pytest.approx(event_frequency[pooled_counts].sum() / frequency[pooled_counts].sum())


def test_intervals_are_those_of_the_block_bootstrap() -> None:
    """A lead time of 40 days has too few blocks, persistent errors widen intervals, and a rare point has none."""
    ends = ReliabilityStatistics.build(draw_event(120, 5, np.linspace(0, 1, 6))).observed_intervals(LEADS)
    assert ends.shape == (2, 2, 6, 1)
    assert np.isnan(ends[:, 1]).all()
    assert MIN_BLOCKS_FOR_INTERVALS > 120 // 42
    centre = ReliabilityStatistics.build(draw_event(120, 5, np.linspace(0, 1, 6))).metrics()[OBSERVED_FREQUENCY]
    assert ((ends[0, 0] < centre[0]) & (centre[0] < ends[1, 0])).all()
    assert ends[0, 0].min() >= 0
    assert ends[1, 0].max() <= 1
    persistent_ends = ReliabilityStatistics.build(
        draw_event(120, 5, np.linspace(0, 1, 6), memory=0.9)
    ).observed_intervals(LEADS)
    middle = slice(1, 5)  # probabilities near 0 and 1 are clipped
    assert (np.diff(persistent_ends, axis=0)[0, 0, middle] > 1.5 * np.diff(ends, axis=0)[0, 0, middle]).all()
    events = draw_event(120, 5, np.linspace(0, 1, 6))
    events.forecasts[5:, ..., 3] = events.occurrences[5:, ..., 3] = 0.0
    ends_with_rare_point = ReliabilityStatistics.build(events).observed_intervals(LEADS)
    assert np.isnan(ends_with_rare_point[:, 0, 3]).all()
    assert np.isfinite(ends_with_rare_point[:, 0, [0, 1, 2, 4, 5]]).all()


def test_intervals_cover_the_truth() -> None:
    """In 200 series of 120 days, a naive interval for independent cells covers the truth in about two of three."""
    chance = np.linspace(0.3, 0.7, 6)
    is_covered = []
    is_covered_by_naive_interval = []
    for seed in range(200):
        sums = ReliabilityStatistics.build(draw_event(120, 5, chance, memory=0.6, seed=seed))
        low, high = sums.observed_intervals(LEADS[:1])[:, 0, :, 0]
        is_covered.append((low < chance) & (chance < high))
        metrics = sums.metrics()
        cells = 120 * 200 * metrics["diagram_frequency"][0, :, 0]
        observed = metrics[OBSERVED_FREQUENCY][0, :, 0]
        is_covered_by_naive_interval.append(abs(observed - chance) < 1.96 * np.sqrt(observed * (1 - observed) / cells))
    assert 0.90 < np.mean(is_covered) < 0.985
    assert np.mean(is_covered_by_naive_interval) < 0.7


def test_smaller_ensembles_lack_the_last_points() -> None:
    events = {"model": draw_event(60, 5, np.linspace(0, 1, 6)), "single": draw_event(60, 1, np.array([0.2, 0.8]))}
    for name in ("persistence", "damped_persistence"):
        events[name] = events["single"]
    variables = EventResults([None], events)._diagram_points([*events, "climatology"], LEADS)
    for name, (dims, values) in variables.items():
        assert dims == ("forecast", "event", "lead", "region", "point") and values.shape == (5, 1, 2, 1, 6), name
        assert np.isfinite(values[1, 0, 0, 0]).tolist() == [True] * 2 + [False] * 4
        assert np.isnan(values[-1]).all()
    for name in POINT_NAMES:
        expected = ReliabilityStatistics.build(events["model"]).metrics()[name]
        np.testing.assert_array_equal(variables[name][1][0, 0, :, 0], expected[:, :, 0])
    ends = ReliabilityStatistics.build(events["model"]).observed_intervals(LEADS)
    np.testing.assert_array_equal(variables[f"{OBSERVED_FREQUENCY}_high"][1][0, 0, :, 0], ends[1, :, :, 0])


def build_diagram_table(events: EventStatistics) -> SimpleNamespace:
    """Return the parts of a score table that a diagram needs."""
    variables = EventResults([None], {"model": events})._diagram_points(["model"], LEADS)
    labels = {"event_definition": ("event", ["t2m above 280 K"])}
    coords = {"forecast": ["model"], "event": ["warm"], "lead": LEADS / 60, "region": ["global"], **labels}
    return SimpleNamespace(dataset=xr.Dataset(variables, coords), events=["warm"], display_name=lambda name: "waves")


def test_bars_are_drawn_between_the_ends_of_intervals() -> None:
    events = draw_event(60, 5, np.linspace(0, 1, 6))
    table = build_diagram_table(events)
    figure = plot_reliability_diagrams(table, [24.0, 960.0])
    bars, missing_bars = figure.axes[0].collections  # at 40 days there are too few blocks
    ends = [path.vertices[:, 1].tolist() for path in bars.get_paths()]
    interval = (table.dataset[f"{OBSERVED_FREQUENCY}_{end}"].sel(lead=24.0).values.ravel() for end in ("low", "high"))
    np.testing.assert_allclose(ends, np.stack(list(interval), axis=1))
    assert not np.isfinite([path.vertices[:, 1] for path in missing_bars.get_paths()]).any()
    title = figure.get_suptitle().replace("\n", " ")
    assert title == "Reliability diagrams of waves, global; bars: 95 % intervals"


def test_the_title_mentions_bars_only_if_there_are_some() -> None:
    figure = plot_reliability_diagrams(build_diagram_table(draw_event(10, 5, np.linspace(0, 1, 6))), [24.0])
    assert figure.get_suptitle() == "Reliability diagrams of waves, global"


def test_the_base_rate_is_the_mean_over_scored_lead_times() -> None:
    """The event is rarer after a day than after 40 days; then the last lead time has no scores."""
    events = draw_event(10, 5, np.linspace(0, 1, 6))
    events.occurrences[:, 0] *= 0.5
    rates = events.occurrences.sum(axis=-1).mean(axis=0).ravel()

    def read_drawn_rate() -> float:
        figure = plot_reliability_diagrams(build_diagram_table(events), [24.0, 960.0])
        (line,) = [line for line in figure.axes[0].lines if line.get_label() == "Base rate"]
        return line.get_ydata()[0]

    assert read_drawn_rate() == pytest.approx(rates.mean())
    events.forecasts[:, 1] = events.occurrences[:, 1] = np.nan
    assert read_drawn_rate() == pytest.approx(rates[0])
