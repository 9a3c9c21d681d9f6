"""Tests of the comparison of Brier scores and SEEPS in the table of scores, against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from credit.channels import ChannelMap
from credit.config.sections.verification import EventConfig
from credit.verify.scores.events import EventStatistics
from credit.verify.scores.seeps import SeepsStatistics
from credit.verify.scores.thresholds import Event, Precipitation
from credit.verify.significance.comparison import FALSE_DISCOVERY_RATE
from credit.verify.statistics.case_statistics import DeterministicStatistics
from credit.verify.table.event_rows import EventResults
from credit.verify.table.scorecard import scorecard_rows, scorecard_values
from credit.verify.table.table import COMMON_ATTRIBUTES, ScoreTable
from credit.verify.table.table_builder import TableAxes, TableRows, build_table

DAY, CASES, REGIONS = 1440, 60, ["global", "tropics", "antarctic"]
LEADS = np.array([DAY, 20 * DAY])  # 60 blocks of one case, and 20 blocks of three cases
INITIAL = np.arange(CASES) * 8 * DAY
MEMBERS, FAIR = {"model": 5, "old": 9}, {"model": 0.95, "old": 0.9}  # the others are single forecasts
SIZES = {"model": 1.0, "old": 1.1, "persistence": 2.0, "damped_persistence": 1.5, "climatology": 1.2}
CHANNELS = ChannelMap.build({"prognostic": {"vars_3D": [], "vars_2D": ["t2m", "tp"]}}, []).output


def draw_scores(size: float, seed: int, rows: int) -> np.ndarray:
    """Draw random scores with the mean `size`, (case, lead, row, region)."""
    shape = CASES, len(LEADS), rows, len(REGIONS)
    return size * np.random.default_rng(seed).gamma(30.0, 1 / 30, shape)


@pytest.fixture(scope="module")
def table_and_scores() -> tuple[ScoreTable, dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """Table, Brier scores (case, lead, event, region) and SEEPS penalties by forecast, and the area that SEEPS scores.

    The forecast `old` has no rain, and SEEPS scores no cell of the third region. Fair Brier scores are `FAIR` times
    the Brier scores.
    """
    brier = {name: 0.1 * draw_scores(size, seed, 2) for seed, (name, size) in enumerate(SIZES.items())}
    brier["model"][:, :, 1] = 0.14  # worse than the 0.12 of the climatology
    penalty = {name: 0.3 * draw_scores(size, 10 + seed, 1) for seed, (name, size) in enumerate(SIZES.items())}
    area = np.random.default_rng(99).uniform(0.4, 0.6, penalty["model"].shape)
    area[..., 2] = 0.0
    brier["old"][:, :, 1] = np.nan
    events = {}
    for name in set(SIZES) - {"climatology"}:
        members = MEMBERS.get(name, 1)
        counts = np.full((*brier[name].shape, members + 1), 1 / (members + 1))
        fair = brier[name] * FAIR.get(name, np.nan)
        events[name] = EventStatistics(
            INITIAL, counts, counts / 2, brier[name], fair, brier["climatology"], num_members=members
        )
    rain = {}
    for name, penalties in penalty.items():
        penalties[..., 2] = 0.0
        penalties *= np.nan if name == "old" else 1.0
        rain[name] = SeepsStatistics(INITIAL, penalties, area * (np.nan if name == "old" else 1.0))
    names = {"warm": (0, 290.0), "wet": (1, 5.0)}
    event_definitions = [
        Event.build(n, EventConfig(channel=CHANNELS[c].name, above=v), c, "1") for n, (c, v) in names.items()
    ]
    squares = {name: draw_scores(size, 20 + seed, 2) for seed, (name, size) in enumerate(SIZES.items())}
    sums = {}
    for name, squared_errors in squares.items():
        # Only events are tested, so every deterministic statistic is the same array.
        arrays = [squared_errors] * len(DeterministicStatistics.array_names())
        sums[name] = (DeterministicStatistics(INITIAL, *arrays), [0, 1])
    attributes = dict.fromkeys(COMMON_ATTRIBUTES, "x") | {
        "n_cases": CASES,
        "level_units": "hPa",
        "initial_times": "made up",
    }
    table = build_table(
        sums,
        TableAxes(
            TableRows(CHANNELS, [], {c.variable: {"units": "1"} for c in CHANNELS}),
            LEADS,
            {"all": np.ones(CASES, dtype=bool), "JJA": np.arange(CASES) % 20 < 5},
            REGIONS,
        ),
        attributes,
        None,
        EventResults(event_definitions, events, [Precipitation(1, 1.0)], rain),
    )  # fmt: skip
    return table, brier, penalty, area


def compute_expected_p_value(model: np.ndarray, opponent: np.ndarray, lead: int) -> float:
    """Return the p-value of a paired t test of block means; their autocorrelation reduces t."""
    if lead > 0:  # Forecasts overlap in time, so a block has three cases.
        model = model.reshape(20, 3).mean(axis=1)
        opponent = opponent.reshape(20, 3).mean(axis=1)
    difference = model - opponent
    deviation = difference - difference.mean()
    autocorrelation = np.clip((deviation[1:] * deviation[:-1]).sum() / (deviation**2).sum(), 0.0, 0.9)
    inflation = np.sqrt((1 + autocorrelation) / (1 - autocorrelation))
    t = stats.ttest_rel(model, opponent).statistic / inflation
    return 2 * stats.t.sf(abs(t), len(model) - 1)


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("region", [0, 1])
@pytest.mark.parametrize(("reference", "opponent"), [("best_baseline", "climatology"), ("old", "old")])
def test_brier_comparison_equals_scipys_paired_test(
    table_and_scores: tuple, lead: int, region: int, reference: str, opponent: str
) -> None:
    table, brier, *_ = table_and_scores
    model, opponent_scores = (brier[name][:, lead, 0, region] for name in ("model", opponent))
    expected = compute_expected_p_value(model, opponent_scores, lead)
    results = [
        table.comparison(f"brier_{name}:warm", "t2m", reference, REGIONS[region])[lead]
        for name in ("p_value", "difference")
    ]
    np.testing.assert_allclose(results, [expected, model.mean() / opponent_scores.mean() - 1], rtol=1e-6)
    scores = {
        name: table.scores_by_lead(name, "t2m", "brier:warm", REGIONS[region])[lead] for name in ("model", opponent)
    }
    assert results[1] == pytest.approx(scores["model"] / scores[opponent] - 1)


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize(("reference", "opponent"), [("best_baseline", "climatology"), ("old", "old")])
def test_fair_brier_comparison_equals_scipys_paired_test(
    table_and_scores: tuple, lead: int, reference: str, opponent: str
) -> None:
    """Of the baselines, only the climatology has a fair score, which is its Brier score."""
    table, brier, *_ = table_and_scores
    model, opponent_scores = (brier[name][:, lead, 0, 0] * FAIR.get(name, 1.0) for name in ("model", opponent))
    results = [
        table.comparison(f"brier_fair_{name}:warm", "t2m", reference)[lead] for name in ("p_value", "difference")
    ]
    expected = compute_expected_p_value(model, opponent_scores, lead), model.mean() / opponent_scores.mean() - 1
    np.testing.assert_allclose(results, expected, rtol=1e-6, atol=1e-12)
    scores = {
        name: table.scores_by_lead(name, "t2m", "brier_fair:warm")[lead] for name in ("model", opponent, "persistence")
    }
    assert results[1] == pytest.approx(scores["model"] / scores[opponent] - 1)
    assert np.isnan(scores["persistence"])
    data = table.dataset.sel(reference=reference, season="all", region="global")
    p = data["brier_fair_p_value"].values.ravel()
    adjusted = data["brier_fair_p_adjusted"].values.ravel()
    np.testing.assert_allclose(adjusted[~np.isnan(p)], stats.false_discovery_control(p[~np.isnan(p)]), rtol=1e-9)
    assert np.isnan(adjusted[np.isnan(p)]).all()


@pytest.mark.parametrize("lead", [0, 1])
def test_seeps_comparison_equals_scipys_paired_test(table_and_scores: tuple, lead: int) -> None:
    table, _, penalty, area = table_and_scores
    best = "climatology"
    model, opponent_scores = (penalty[name][:, lead, 0, 0] for name in ("model", best))
    expected = compute_expected_p_value(model, opponent_scores, lead)  # the scored area is the same for both
    assert table.comparison("seeps_p_value", "tp")[lead] == pytest.approx(expected, rel=1e-6)
    ratio = table.scores_by_lead("model", "tp", "seeps")[lead] / table.scores_by_lead(best, "tp", "seeps")[lead]
    assert table.comparison("seeps_difference", "tp")[lead] == pytest.approx(ratio - 1)
    assert ratio == pytest.approx(model.mean() / opponent_scores.mean())


def test_missing_scores_have_no_comparison(table_and_scores: tuple) -> None:
    data = table_and_scores[0].dataset
    for name in ("p_value", "difference", "n_eff", "p_adjusted"):
        assert np.isnan(data[f"brier_{name}"].sel(reference="old", event="wet")).all()
        assert np.isnan(data[f"seeps_{name}"].sel(reference="old")).all()
        assert np.isnan(data[f"seeps_{name}"].sel(channel="t2m")).all()
        assert np.isnan(data[f"seeps_{name}"].sel(region="antarctic")).all()
    assert np.isfinite(data["seeps_p_value"].sel(reference="best_baseline", channel="tp", region="global")).any()
    assert not data["brier_significant"].sel(season="JJA").any()  # 15 cases


def test_one_false_discovery_rate_over_the_scorecard(table_and_scores: tuple) -> None:
    """RMSE of two channels, SEEPS and two events, each at two lead times, are ten tests."""
    table = table_and_scores[0]
    selection = {"reference": "best_baseline", "season": "all", "region": "global"}
    scores = table.dataset.sel(selection)
    p = np.concatenate(
        [scores["p_value"], scores["seeps_p_value"].sel(channel=["tp"]), scores["brier_p_value"]]
    ).ravel()
    adjusted = [scores["p_adjusted"], scores["seeps_p_adjusted"].sel(channel=["tp"]), scores["brier_p_adjusted"]]
    assert len(p) == 10
    np.testing.assert_allclose(np.concatenate(adjusted).ravel(), stats.false_discovery_control(p), rtol=1e-9)
    rows = scorecard_rows(table)
    assert [row.name for row in rows] == ["t2m", "tp", "tp: SEEPS", "warm: Brier score", "wet: Brier score"]
    assert [row.score for row in rows] == ["rmse", "rmse", "seeps", "brier:warm", "brier:wet"]
    is_significant = scorecard_values(table, rows, "significant")[0, 0, ..., 0]
    np.testing.assert_array_equal(is_significant.ravel(), np.concatenate(adjusted).ravel() <= FALSE_DISCOVERY_RATE)
    difference = scorecard_values(table, rows, "difference")[0, 0, ..., 0]
    np.testing.assert_array_equal(difference[3], table.comparison("brier_difference:warm", "t2m"))
    assert is_significant[3].all()
    assert (difference[3] < 0).all()
    assert (difference[4] > 0).all()
