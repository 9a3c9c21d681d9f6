"""Tests of Brier scores, against two libraries, the sum of their decomposition, and known expectations."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import xarray as xr

from credit.config.sections.verification import REGIONS
from credit.verify.scores.events import EventStatistics
from credit.verify.significance.bootstrap import confidence_intervals
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.regions import region_weights
from tests.unit.verify.ensembles import (
    CELLS,
    CHANNELS,
    GRID,
    MEANS,
    NAMES,
    Cases,
    average_over_cases,
    draw_cases,
    is_mean_consistent,
)

MEMBERS = 5
THRESHOLDS = np.array([5e4, 280.0, 290.0]) + np.array([[-5.0], [0.0], [15.0]])
CLIMATOLOGY = np.array([0.7, 0.5, 0.1])[:, None] * np.ones((3, len(CHANNELS)))


def _compute_statistics(
    cases: Cases,
    thresholds: np.ndarray = THRESHOLDS[:, :, None],
    climatology: np.ndarray = CLIMATOLOGY[:, :, None],
    case_range: range | None = None,
    area_mean: AreaMean = MEANS,
) -> EventStatistics:
    """Return the statistics of events with thresholds and climatological probabilities, each (E, C, 1 or P).

    The channel varies fastest in the rows of the result.
    """
    case_indices = list(case_range or range(len(cases.truth)))
    events, channels = thresholds.shape[:2]
    sums = EventStatistics.empty(
        1440 * np.array(case_indices), 1, events * channels, len(NAMES), cases.members.shape[1]
    )
    for number, case in enumerate(case_indices):
        for e, c in np.ndindex(events, channels):
            index = number, 0, e * channels + c
            fields = cases.members[case][:, c], cases.truth[case][c], thresholds[e, c], climatology[e, c]
            sums.add(index, area_mean, c, *fields)
    return sums


def _split_by_channel(values: np.ndarray) -> np.ndarray:
    """Return values (1, E * C, ...) of one lead time as (E, C, ...)."""
    return values[0].reshape(-1, len(CHANNELS), *values.shape[2:])


def _compute_metrics(sums: EventStatistics) -> dict[str, np.ndarray]:
    return {name: _split_by_channel(value) for name, value in sums.metrics().items()}


def test_the_library_agrees() -> None:
    """Both scores are compared with `scores`, and the climatological reference with numpy."""
    scores = pytest.importorskip("scores")
    cases = draw_cases(4, MEMBERS, spread=0.8)
    members, truth = cases.labelled
    metrics = _compute_metrics(_compute_statistics(cases))
    for event in range(len(THRESHOLDS)):
        for channel in range(len(CHANNELS)):
            members_and_truth = members.isel(channel=[channel]), truth.isel(channel=[channel])
            for name, fair in (("brier", False), ("brier_fair", True)):
                cells = scores.probability.brier_score_for_ensemble(
                    *members_and_truth,
                    "member",
                    float(THRESHOLDS[event, channel]),
                    fair_correction=fair,
                    event_threshold_operator=operator.gt,
                    preserve_dims="all",
                )
                expected = average_over_cases(cells.isel(threshold=0))[0]
                np.testing.assert_allclose(metrics[name][event, channel], expected, rtol=1e-9)
                has_occurred = (members_and_truth[1] > THRESHOLDS[event, channel]).where(members_and_truth[1].notnull())
                reference = average_over_cases((CLIMATOLOGY[event, channel] - has_occurred) ** 2)[0]
                skill = metrics["brier_skill" if name == "brier" else "brier_skill_fair"][event, channel]
                np.testing.assert_allclose(skill, 1 - expected / reference, rtol=1e-8, atol=1e-10)


def test_reliability_diagram_agrees_with_xskillscore() -> None:
    """`xskillscore` has no area weights, so all cells are masked except one latitude circle."""
    xskillscore = pytest.importorskip("xskillscore")
    masked = np.ones(GRID.shape, dtype=bool)
    masked[2] = False
    masks = {channel.variable: masked for channel in CHANNELS}
    circle = AreaMean(CHANNELS, masks, region_weights(GRID, {name: REGIONS[name] for name in NAMES}))
    cases = draw_cases(6, MEMBERS)
    sums = _compute_statistics(cases, area_mean=circle)
    shares, observed = (_split_by_channel(values) for values in sums.diagram())
    np.testing.assert_allclose(sums.probabilities, np.arange(MEMBERS + 1) / MEMBERS)
    edges = (np.arange(MEMBERS + 2) - 0.5) / MEMBERS
    cells = ~masked.reshape(-1)
    for event, channel in np.ndindex(3, 2):
        threshold = THRESHOLDS[event, channel]
        has_occurred = xr.DataArray(cases.truth[:, channel, cells] > threshold, dims=("case", "cell"))
        forecast = (cases.members[:, :, channel, cells] > threshold).mean(axis=1)
        expected = xskillscore.reliability(
            has_occurred, xr.DataArray(forecast, dims=("case", "cell")), probability_bin_edges=edges
        )
        for region in (NAMES.index("global"), NAMES.index("extratropics_north")):
            np.testing.assert_allclose(observed[event, channel, region], expected, rtol=1e-9)
            samples = expected["samples"] / has_occurred.size
            np.testing.assert_allclose(shares[event, channel, region], samples, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("members", [1, 2, 9])
def test_decomposition_adds_up_to_the_score(members: int) -> None:
    metrics = _compute_metrics(_compute_statistics(draw_cases(5, members, spread=0.6)))
    sums_of_parts = metrics["reliability"] - metrics["resolution"] + metrics["uncertainty"]
    np.testing.assert_allclose(sums_of_parts, metrics["brier"], rtol=1e-12, atol=1e-14)
    for name in ("reliability", "resolution", "uncertainty"):
        assert (metrics[name] >= 0).all()
        assert metrics[name].max() > 0.001


def test_scores_of_two_cases_by_hand() -> None:
    """In one case, 1 of 2 members has the event and it occurs; in the other, both have it and it does not occur."""
    sums = EventStatistics.empty(np.array([0, 1440]), 1, 1, len(NAMES), 2)
    for case, (members, truth) in enumerate((((0.0, 2.0), 2.0), ((2.0, 2.0), 1.0))):
        fields = np.stack([np.full(CELLS, value) for value in members])
        limits = np.array([1.0]), np.full(CELLS, 0.25)  # a value of 1 does not exceed the threshold 1
        sums.add((case, 0, 0), MEANS, 2, fields, np.full(CELLS, truth), *limits)
    expected = {
        "brier": (0.25 + 1) / 2,
        "brier_fair": (0 + 1) / 2,
        "reliability": (0.25 + 1) / 2,
        "resolution": 0.25,
        "uncertainty": 0.25,
        "brier_skill": 1 - 0.625 / 0.3125,
        "brier_skill_fair": 1 - 0.5 / 0.3125,
    }
    metrics = sums.metrics()
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-12, atol=1e-15, err_msg=name)
    share, observed = sums.diagram()
    np.testing.assert_allclose(share[0, 0, 0], [0, 0.5, 0.5])
    np.testing.assert_array_equal(observed[0, 0, 0], [np.nan, 1, 0])
    climatology = sums.of_climatology().metrics()
    for name in ("brier", "brier_fair"):
        np.testing.assert_allclose(climatology[name], 0.3125)
    assert (climatology["brier_skill"] == 0).all()
    assert np.isnan(climatology["reliability"]).all()


@pytest.mark.parametrize("count", [2, 4, 16])
def test_only_the_fair_score_has_the_expectation_of_the_distribution(count: int) -> None:
    """The event has the probability 0.3, and 0.5 in the forecast; 400 independent cases, 4 standard errors."""
    rng = np.random.default_rng(count)
    brier = []
    fair = []
    for _ in range(400):
        cases = Cases(
            rng.random((1, count, len(CHANNELS), CELLS)), rng.random((1, len(CHANNELS), CELLS)) - 0.2, np.empty(0)
        )
        metrics = _compute_statistics(cases, np.full((1, 1, 1), 0.5), np.full((1, 1, 1), 0.3)).metrics()
        brier.append(metrics["brier"][0, 0, 0])
        fair.append(metrics["brier_fair"][0, 0, 0])
    exact = 0.5**2 - 2 * 0.5 * 0.3 + 0.3
    assert is_mean_consistent(np.array(fair), exact)
    assert is_mean_consistent(np.array(brier), exact + 0.25 / count)
    assert not is_mean_consistent(np.array(brier), exact)


def test_one_member_has_no_fair_score() -> None:
    metrics = _compute_statistics(draw_cases(2, 1)).metrics()
    assert np.isnan(metrics["brier_fair"]).all()
    assert np.isnan(metrics["brier_skill_fair"]).all()
    assert np.isfinite(metrics["brier"]).all()


def test_there_is_no_skill_against_a_climatology_that_is_never_wrong() -> None:
    """An event that never occurs has a Brier score; its skill and the interval of the skill are NaN, not infinite."""
    cases = draw_cases(48, 4)
    never = np.full((1, len(CHANNELS), 1), cases.truth.max() + 1.0)
    cases.members[:, 0] = never[0, :, 0].max() + 1.0
    sums = _compute_statistics(cases, never, np.zeros((1, len(CHANNELS), 1)))
    metrics = sums.metrics()
    intervals = confidence_intervals(sums, 0, 1440)
    np.testing.assert_allclose(metrics["brier"], 1 / 16, rtol=1e-12)
    np.testing.assert_allclose(intervals["brier"], 1 / 16, rtol=1e-9)
    for name in ("brier_skill", "brier_skill_fair"):
        assert np.isnan(metrics[name]).all()
        assert np.isnan(intervals[name]).all()


def test_skill_is_relative_to_the_climatology_of_each_cell() -> None:
    """A large ensemble of the climatology has no skill; an ensemble around the truth has some."""
    rng = np.random.default_rng(1)
    shape = (len(CHANNELS), CELLS)
    mean = 10 * rng.standard_normal(shape)
    upper = (mean + 1.2815515655446004)[None]  # the quantile 0.9 of N(mean, 1)
    climatology = np.full((1, *shape), 0.1)
    truth = mean + rng.standard_normal((150, *shape))
    draws = rng.standard_normal((150, 40, *shape))
    climatological_metrics = _compute_statistics(Cases(mean + draws, truth, truth), upper, climatology).metrics()
    skilful_metrics = _compute_statistics(
        Cases(truth[:, None] + 0.5 * draws, truth, truth), upper, climatology
    ).metrics()
    np.testing.assert_allclose(climatological_metrics["brier_skill_fair"], 0, atol=0.02)
    assert (climatological_metrics["brier_skill"] < climatological_metrics["brier_skill_fair"]).all()
    assert skilful_metrics["brier_skill_fair"].min() > 0.3


def test_joined_parts_are_equal_to_the_last_bit_and_frequencies_sum_to_1() -> None:
    cases = draw_cases(3, MEMBERS)
    statistics = _compute_statistics(cases)
    np.testing.assert_allclose(statistics.forecasts.sum(axis=-1), 1)
    joined = EventStatistics.join(
        [_compute_statistics(cases, case_range=range(1, 3)), _compute_statistics(cases, case_range=range(1))]
    )
    for name, values in statistics.arrays().items():
        np.testing.assert_array_equal(getattr(joined, name), values)


def test_an_event_that_a_forecast_lacks_has_no_score() -> None:
    sums = EventStatistics.empty(np.zeros(1), 1, 2, len(NAMES), 2)
    members_and_truth = np.array([[0.0], [2.0]]) * np.ones(CELLS), np.ones(CELLS)
    sums.add((0, 0, 1), MEANS, 0, *members_and_truth, np.array([1.0]), np.full(CELLS, 0.5))
    for values in sums.metrics().values():
        assert np.isnan(values[0, 0]).all()
        assert np.isfinite(values[0, 1]).all()


def test_intervals_of_the_skill_cover_it() -> None:
    """There are 300 events on independent days; the mean Brier score is 0.125, that of the climatology 0.25."""
    rng = np.random.default_rng(5)
    shape = (300, 1)
    days = np.arange(120)
    sums = EventStatistics.empty(1440 * days, 1, *shape)
    sums.brier[:] = rng.gamma(4.0, 0.125 / 4, (120, 1, *shape))
    sums.brier_fair[:] = np.nan
    sums.reference[:] = rng.gamma(4.0, 0.25 / 4, (120, 1, *shape))
    intervals = confidence_intervals(sums, 0, 1440)
    for name, truth in (("brier", 0.125), ("brier_skill", 0.5)):
        low, high = intervals[name][..., 0]
        assert 0.9 <= ((low < truth) & (truth < high)).mean() <= 0.99, name
    assert np.isnan(intervals["brier_fair"]).all()
