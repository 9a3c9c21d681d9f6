"""Tests of the comparison of CRPS in the table of scores and the scorecard, against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from credit.channels import ChannelMap
from credit.verify.significance.comparison import COMPARISON_NAMES, SIGNIFICANCE_NAMES
from credit.verify.statistics.case_statistics import DeterministicStatistics, EnsembleStatistics
from credit.verify.table.scorecard import scorecard_rows, scorecard_values
from credit.verify.table.table import COMMON_ATTRIBUTES, ScoreTable
from credit.verify.table.table_builder import TableAxes, TableRows, build_table
from tests.unit.verify.table.test_event_comparison import (
    CASES,
    INITIAL,
    LEADS,
    REGIONS,
    compute_expected_p_value,
    draw_scores,
)

MEMBERS = {"model": 5, "old": 9}  # the others are single forecasts
SIZES = {"model": 1.0, "old": 1.05, "single": 1.3, "persistence": 2.0, "damped_persistence": 1.5, "climatology": 1.2}
CHANNELS = ChannelMap.build({"prognostic": {"vars_3D": [], "vars_2D": ["u10", "v10", "t2m"]}}, []).output
ROWS = 4  # three channels and the wind
Planes = dict[str, dict[str, np.ndarray]]


def build_score_table(planes: Planes, members: dict[str, int]) -> ScoreTable:
    sums = {}
    for name, values_by_plane in planes.items():
        statistics_class = EnsembleStatistics if name in members else DeterministicStatistics
        statistics = {
            plane: values_by_plane.get(plane, values_by_plane["absolute_error"])
            for plane in statistics_class.array_names()
        }
        sums[name] = statistics_class(INITIAL, **statistics, num_members=members.get(name, 1)), range(ROWS)
    attributes = dict.fromkeys(COMMON_ATTRIBUTES, "x") | {
        "n_cases": CASES,
        "level_units": "hPa",
        "initial_times": "made up",
    }
    rows = TableRows(CHANNELS, [(0, 1, "wind10m")], {c.variable: {"units": "1"} for c in CHANNELS})
    return build_table(sums, TableAxes(rows, LEADS, {"all": np.ones(CASES, dtype=bool)}, REGIONS), attributes)


@pytest.fixture(scope="module")
def planes() -> Planes:
    """Squared and absolute errors, CRPS and fair CRPS of each case by forecast, (case, lead, row, region)."""
    planes = {}
    for seed, (name, size) in enumerate(SIZES.items()):
        squared, absolute, crps, fair = (draw_scores(size, 10 * seed + number, ROWS) for number in range(4))
        planes[name] = {
            "squared_error": squared,
            "absolute_error": absolute,
            "crps": 0.9 * crps,
            "crps_fair": 0.8 * fair,
        }
    return planes


@pytest.fixture(scope="module")
def table(planes: Planes) -> ScoreTable:
    return build_score_table(planes, MEMBERS)


def select_comparison(table: ScoreTable, score: str, reference: str, row: int) -> dict[str, np.ndarray]:
    """Return the comparison of a channel or, for the row behind the channels, of the wind, (L, R) each."""
    comparison = table.dataset.sel(reference=reference, season="all")
    names = (*COMPARISON_NAMES, *SIGNIFICANCE_NAMES)
    if row < len(CHANNELS):
        return {name: comparison[f"{score}_{name}"].values[row] for name in names}
    return {name: comparison[f"wind_{score}_{name}"].values[row - len(CHANNELS)] for name in names}


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("row", [2, 3])
@pytest.mark.parametrize(
    ("reference", "plane"), [("best_baseline", "absolute_error"), ("single", "absolute_error"), ("old", "crps")]
)
def test_crps_comparison_equals_scipys_paired_test(
    table: ScoreTable, planes: Planes, lead: int, row: int, reference: str, plane: str
) -> None:
    """The CRPS of a single forecast is its absolute error."""
    name = "climatology" if reference == "best_baseline" else reference
    model = planes["model"]["crps"][:, lead, row, 1]
    opponent = planes[name][plane][:, lead, row, 1]
    results = select_comparison(table, "crps", reference, row)
    assert results["p_value"][lead, 1] == pytest.approx(compute_expected_p_value(model, opponent, lead), rel=1e-6)
    assert results["difference"][lead, 1] == pytest.approx(model.mean() / opponent.mean() - 1, rel=1e-9)
    assert 0 < results["n_eff"][lead, 1] <= CASES
    if row < len(CHANNELS):
        scores = [
            table.scores_by_lead(forecast, CHANNELS[row].name, "crps", REGIONS[1])[lead] for forecast in ("model", name)
        ]
        assert results["difference"][lead, 1] == pytest.approx(scores[0] / scores[1] - 1)


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("row", [0, 3])
def test_a_fair_score_is_compared_with_a_fair_score(table: ScoreTable, planes: Planes, lead: int, row: int) -> None:
    model, opponent = (planes[name]["crps_fair"][:, lead, row, 0] for name in ("model", "old"))
    results = select_comparison(table, "crps_fair", "old", row)
    assert results["p_value"][lead, 0] == pytest.approx(compute_expected_p_value(model, opponent, lead), rel=1e-6)
    assert results["difference"][lead, 0] == pytest.approx(model.mean() / opponent.mean() - 1, rel=1e-9)
    # The interval excludes 0 where the p-value is below 5 %.
    excludes_0 = (results["difference_low"] > 0) | (results["difference_high"] < 0)
    np.testing.assert_array_equal(excludes_0, results["p_value"] < 0.05)
    for single in ("best_baseline", "single"):
        results_without_fair_score = select_comparison(table, "crps_fair", single, row)
        assert all(np.isnan(results_without_fair_score[name]).all() for name in (*COMPARISON_NAMES, "p_adjusted"))
        assert not results_without_fair_score["significant"].any()


def test_one_false_discovery_rate_over_the_scorecard(table: ScoreTable) -> None:
    """RMSE and CRPS of three channels and a wind at two lead times are one set of tests, fair CRPS another."""
    comparison = table.dataset.sel(reference="old", season="all", region="global")
    scorecard_scores = [f"{wind}{score}" for score in ("", "crps_") for wind in ("", "wind_")]
    for scores, number in ((scorecard_scores, 16), (["crps_fair_", "wind_crps_fair_"], 8)):
        p_values = np.concatenate([comparison[f"{score}p_value"].values.ravel() for score in scores])
        adjusted = np.concatenate([comparison[f"{score}p_adjusted"].values.ravel() for score in scores])
        assert p_values.size == number
        np.testing.assert_allclose(adjusted, stats.false_discovery_control(p_values, method="bh"), rtol=1e-12)


def test_the_scorecard_has_rows_of_crps(table: ScoreTable) -> None:
    rows = scorecard_rows(table)
    assert [row.name for row in rows] == [
        "u10", "v10", "t2m", "wind10m", "u10: CRPS", "v10: CRPS", "t2m: CRPS", "wind10m: energy score"
    ]  # fmt: skip
    assert [row.row for row in rows] == [0, 1, 2, 3] * 2
    values = scorecard_values(table, rows, "difference")
    dataset = table.dataset
    np.testing.assert_array_equal(values[:, :, 6], dataset["crps_difference"].values[:, :, 2])
    np.testing.assert_array_equal(values[:, :, 7], dataset["wind_crps_difference"].values[:, :, 0])
    np.testing.assert_array_equal(values[:, :, 3], dataset["wind_rmse_difference"].values[:, :, 0])


def test_single_forecasts_have_no_crps_in_the_table(planes: Planes) -> None:
    table = build_score_table(
        {name: {"absolute_error": values_by_plane["absolute_error"]} for name, values_by_plane in planes.items()}, {}
    )
    assert not [name for name in table.dataset if "crps" in str(name)]
    assert {row.score for row in scorecard_rows(table)} == {"rmse"}
