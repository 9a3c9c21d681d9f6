"""The points of reliability diagrams and their intervals, by hand and on events whose frequency is known."""

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


def draw(
    days: int, members: int, chance: np.ndarray, memory: float = 0.0, seed: int = 0, cells: int = 200
) -> EventStatistics:
    """Return one event of daily cases, the same at both leads, which happens with `chance` (M + 1,) by its forecast.

    What is above or below that chance is common to all cells of a day and lasts, by `memory`, to the next.
    """
    rng = np.random.default_rng(seed)
    forecasts = rng.multinomial(cells, np.full(members + 1, 1 / (members + 1)), size=days) / cells
    weather = np.empty(days)
    weather[0] = rng.standard_normal()
    for day in range(1, days):
        weather[day] = memory * weather[day - 1] + np.sqrt(1 - memory**2) * rng.standard_normal()
    happened = forecasts * np.clip(chance + 0.08 * weather[:, None], 0, 1)
    planes = (np.stack([plane, plane], axis=1)[:, :, None, None] for plane in (forecasts, happened))
    nothing = np.zeros((days, 2, 1, 1))
    return EventStatistics(DAY * np.arange(days), *planes, nothing, nothing, nothing, num_members=members)


def test_points_are_the_diagram() -> None:
    """Of up to 11 probabilities each is a point; a test of the diagram itself is with that of the events."""
    events = draw(80, 10, np.linspace(0.1, 0.9, 11))
    metrics = ReliabilityStatistics.build(events).metrics()
    shares, observed = events.diagram()
    np.testing.assert_allclose(metrics["diagram_probability"][:, :, 0], np.tile(np.arange(11) / 10, (2, 1)))
    np.testing.assert_allclose(metrics["diagram_frequency"][:, :, 0], shares[:, 0, 0])
    np.testing.assert_allclose(metrics[OBSERVED_FREQUENCY][:, :, 0], observed[:, 0, 0])


def test_points_of_large_ensembles_are_pooled() -> None:
    events = draw(40, 50, np.linspace(0.1, 0.9, 51))
    events.forecasts[..., 7] = events.occurrences[..., 7] = 0.0
    p, share, observed = (values[0, :, 0] for values in ReliabilityStatistics.build(events).metrics().values())
    frequency = events.forecasts.mean(axis=0)[0, 0, 0]
    happened = events.occurrences.mean(axis=0)[0, 0, 0]
    assert len(p) == 11
    assert (np.diff(p) > 0).all()
    assert share.sum() == pytest.approx(frequency.sum())
    assert (p * share).sum() == pytest.approx((np.arange(51) / 50 * frequency).sum())
    for point, chosen in enumerate(np.array_split(np.arange(51), np.arange(1, 11) * 51 // 11)):
        assert observed[point] == pytest.approx(happened[chosen].sum() / frequency[chosen].sum())


def test_intervals_are_of_the_block_bootstrap() -> None:
    """40 lead days leave too few blocks; where errors last, bars are longer; a rare point has none."""
    ends = ReliabilityStatistics.build(draw(120, 5, np.linspace(0, 1, 6))).observed_intervals(LEADS)
    assert ends.shape == (2, 2, 6, 1)
    assert np.isnan(ends[:, 1]).all()
    assert MIN_BLOCKS_FOR_INTERVALS > 120 // 42
    centre = ReliabilityStatistics.build(draw(120, 5, np.linspace(0, 1, 6))).metrics()[OBSERVED_FREQUENCY]
    assert ((ends[0, 0] < centre[0]) & (centre[0] < ends[1, 0])).all()
    assert ends[0, 0].min() >= 0
    assert ends[1, 0].max() <= 1
    lasting = ReliabilityStatistics.build(draw(120, 5, np.linspace(0, 1, 6), memory=0.9)).observed_intervals(LEADS)
    middle = slice(1, 5)  # at 0 and 1 chances are clipped
    assert (np.diff(lasting, axis=0)[0, 0, middle] > 1.5 * np.diff(ends, axis=0)[0, 0, middle]).all()
    events = draw(120, 5, np.linspace(0, 1, 6))
    events.forecasts[5:, ..., 3] = events.occurrences[5:, ..., 3] = 0.0
    rare = ReliabilityStatistics.build(events).observed_intervals(LEADS)
    assert np.isnan(rare[:, 0, 3]).all()
    assert np.isfinite(rare[:, 0, [0, 1, 2, 4, 5]]).all()


def test_how_often_intervals_cover_the_truth() -> None:
    """Of 200 times 120 days; a naive interval, of independent cells, would cover it in two of three."""
    chance = np.linspace(0.3, 0.7, 6)
    hits = []
    naive = []
    for seed in range(200):
        sums = ReliabilityStatistics.build(draw(120, 5, chance, memory=0.6, seed=seed))
        low, high = sums.observed_intervals(LEADS[:1])[:, 0, :, 0]
        hits.append((low < chance) & (chance < high))
        metrics = sums.metrics()
        cells = 120 * 200 * metrics["diagram_frequency"][0, :, 0]
        observed = metrics[OBSERVED_FREQUENCY][0, :, 0]
        naive.append(abs(observed - chance) < 1.96 * np.sqrt(observed * (1 - observed) / cells))
    assert 0.90 < np.mean(hits) < 0.985
    assert np.mean(naive) < 0.7


def test_smaller_ensembles_lack_the_last_points() -> None:
    events = {"model": draw(60, 5, np.linspace(0, 1, 6)), "single": draw(60, 1, np.array([0.2, 0.8]))}
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


def drawn_table(events: EventStatistics) -> SimpleNamespace:
    """Return what a diagram needs of a table."""
    variables = EventResults([None], {"model": events})._diagram_points(["model"], LEADS)
    labels = {"event_definition": ("event", ["t2m above 280 K"])}
    coords = {"forecast": ["model"], "event": ["warm"], "lead": LEADS / 60, "region": ["global"], **labels}
    return SimpleNamespace(dataset=xr.Dataset(variables, coords), events=["warm"], display_name=lambda name: "waves")


def test_bars_are_drawn_from_end_to_end() -> None:
    events = draw(60, 5, np.linspace(0, 1, 6))
    table = drawn_table(events)
    figure = plot_reliability_diagrams(table, [24.0, 960.0])
    bars, none = figure.axes[0].collections  # of 40 days there are too few blocks
    ends = [path.vertices[:, 1].tolist() for path in bars.get_paths()]
    interval = (table.dataset[f"{OBSERVED_FREQUENCY}_{end}"].sel(lead=24.0).values.ravel() for end in ("low", "high"))
    np.testing.assert_allclose(ends, np.stack(list(interval), axis=1))
    assert not np.isfinite([path.vertices[:, 1] for path in none.get_paths()]).any()
    title = figure.get_suptitle().replace("\n", " ")
    assert title == "Reliability diagrams of waves, global; bars: 95 % intervals"


def test_without_bars_none_are_promised() -> None:
    figure = plot_reliability_diagrams(drawn_table(draw(10, 5, np.linspace(0, 1, 6))), [24.0])
    assert figure.get_suptitle() == "Reliability diagrams of waves, global"


def test_the_base_rate_is_of_all_lead_times_that_were_scored() -> None:
    """Rare after a day, frequent after 40 days; then the last lead time has no scores."""
    events = draw(10, 5, np.linspace(0, 1, 6))
    events.occurrences[:, 0] *= 0.5
    rates = events.occurrences.sum(axis=-1).mean(axis=0).ravel()

    def drawn_rate() -> float:
        figure = plot_reliability_diagrams(drawn_table(events), [24.0, 960.0])
        (line,) = [line for line in figure.axes[0].lines if line.get_label() == "Base rate"]
        return line.get_ydata()[0]

    assert drawn_rate() == pytest.approx(rates.mean())
    events.forecasts[:, 1] = events.occurrences[:, 1] = np.nan
    assert drawn_rate() == pytest.approx(rates[0])
