"""Tests of the combination of scores over seeds: means, ranges, significance, tables and files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.channels import Channel
from credit.compare.budget import parse_budget
from credit.compare.costs import RunCosts
from credit.compare.page import tabulate_results, write_comparison_page
from credit.compare.results import ComparisonScores, combine_pair
from credit.compare.stability import StabilityCurve
from credit.compare.tables import build_document, write_csv, write_json
from credit.compare.workflow import CompareOutcome
from credit.config.sections.verification import BASELINES, BEST_BASELINE
from credit.verify.significance.comparison import (
    COMPARISON_NAMES,
    adjust_scorecard,
    compare_with_best_opponent,
    comparison_name,
)
from credit.verify.table.scorecard import scorecard_rows, scorecard_values
from credit.verify.table.table import CSV_COLUMNS, ScoreTable
from tests.browser.pages import make_table as make_page_table
from tests.unit.compare.configs import make_run

NUM_CASES = 200
LEADS = np.array([1440, 2880])
# RMSE of persistence.
PERSISTENCE = 4.0


def make_table(errors: dict[str, float], spread: float = 0.05) -> ScoreTable:
    """Return the table of one seed, with one channel, two lead times and one region.

    Args:
        errors: forecast -> RMSE; the first one is ``model``, the others are references.
        spread: relative deviation between cases of the difference of two forecasts.
    """
    names = ["model", *list(errors)[1:]]
    times = np.arange(NUM_CASES) * 1440
    rng = np.random.default_rng(3)
    difficulty = 1 + 0.5 * np.sin(times / 9000)
    contributions = {}
    for name, error in zip(names, errors.values(), strict=True):
        noise = 1 + spread * rng.normal(size=NUM_CASES)
        values_N = difficulty * noise
        contributions[name] = np.broadcast_to(
            (error**2 * values_N / values_N.mean())[:, None, None, None], (200, 2, 1, 1)
        )
    forecasts = [*names, *BASELINES]
    rmse = np.full((len(forecasts), 1, 1, 2, 1), PERSISTENCE)
    results = {name: np.full((len(names), 1, 1, 2, 1), np.nan) for name in COMPARISON_NAMES}
    for number, name in enumerate(names):
        rmse[number] = list(errors.values())[number]
        if number:
            comparison = compare_with_best_opponent(
                times, contributions["model"], [(contributions[name], [0])], LEADS, power=0.5
            )
            for key, values in comparison.items():
                results[key][number, 0] = values
    n_blocks = np.full((1, 2), 40)
    [adjusted] = adjust_scorecard([results["p_value"]], n_blocks)
    dims = ("season", "channel", "lead", "region")
    data = {"rmse": (("forecast", *dims), rmse), "acc": (("forecast", *dims), 1 - rmse / 10)}
    for key, values in {**results, **adjusted}.items():
        data[comparison_name("rmse", key)] = (("reference", *dims), values)
    data |= {"n_cases": ("season", [NUM_CASES]), "n_blocks": (("season", "lead"), n_blocks)}
    texts = {"members": "1", "prescribed_forcing": "none", "experiment": ""}
    for key in texts:
        data[key] = ("forecast", [texts[key]] * len(forecasts))
    for suffix in ("low", "high"):
        data[f"rmse_{suffix}"] = data["rmse"]
        data[f"acc_{suffix}"] = data["acc"]
    coords = {
        "forecast": forecasts, "reference": [BEST_BASELINE, *names[1:]], "season": ["all"], "channel": ["z500"],
        "lead": LEADS / 60, "region": ["global"], "variable": ("channel", ["z"]), "level": ("channel", [500.0]),
        "units": ("channel", ["m2 s-2"]),
    }  # fmt: skip
    attributes = dict.fromkeys(CSV_COLUMNS, "text") | {"initial_times": "then", "level_units": "hPa"}
    return ScoreTable(xr.Dataset(data, coords, attributes))


def make_scores(a: list[float], b: list[float], spread: float = 0.05) -> ComparisonScores:
    """Return the scores of two runs with the given RMSE of each seed."""
    tables = {}
    for number, (error_a, error_b) in enumerate(zip(a, b, strict=True)):
        tables["a", f"seed_{number}"] = make_table({"a": error_a, "b": error_b}, spread)
        tables["b", f"seed_{number}"] = make_table({"b": error_b}, spread)
    return ComparisonScores(["a", "b"], tables)


def test_means_ranges_and_the_direction_of_the_comparison() -> None:
    scores = make_scores([2.0, 2.2, 2.1], [1.0, 1.1, 1.05])
    row = scores.result_rows()[0]
    assert (row.channel, row.units, row.lead_hours) == ("z500", "m2 s-2", 24)
    assert row.ratio["a"].mean == pytest.approx(2.1 / PERSISTENCE)
    assert (row.ratio["a"].low, row.ratio["a"].high) == pytest.approx((0.5, 0.55))
    assert row.rmse["b"].values == {"seed_0": 1.0, "seed_1": 1.1, "seed_2": 1.05}
    # The later run is compared with the earlier one: half of its error.
    pair = scores.pairs["a", "b"]
    assert pair.comparison("rmse_difference", "z500", "a") == pytest.approx([-0.5, -0.5])
    assert pair.display_name("model") == "b" and pair.candidates == ["model"]
    assert row.best == "b"
    assert scores.is_significant("a", "b", "z500", 24) and scores.is_significant("b", "a", "z500", 48)


@pytest.mark.parametrize(
    ("a", "b", "spread"),
    [
        # Equal errors of each seed, so there is no difference.
        ([2.0, 2.1, 2.2], [2.0, 2.1, 2.2], 0.05),
        # A clear difference of each seed, with another sign in one of them.
        ([2.0, 2.0, 2.0], [1.5, 1.5, 2.5], 0.05),
        # The same sign, but seeds of a run differ more than the runs.
        ([2.0, 3.0, 1.0], [1.9, 2.9, 0.9], 0.05),
        # A difference that is small beside the variation between cases.
        ([2.0, 2.001, 1.999], [1.98, 1.981, 1.979], 3.0),
    ],
)
def test_a_difference_must_exceed_both_cases_and_seeds(a: list[float], b: list[float], spread: float) -> None:
    scores = make_scores(a, b, spread)
    assert not scores.is_significant("a", "b", "z500", 24)
    assert [row.best for row in scores.result_rows()] == [None, None]


def test_one_seed_is_tested_over_cases_alone() -> None:
    tables = [make_table({"a": 2.0, "b": 1.9})]
    pair = combine_pair(tables, "a", "b")
    reference = tables[0].comparison("p_value", "z500", "b")
    assert pair.comparison("p_value", "z500", "a") == pytest.approx(reference)
    assert pair.comparison("rmse_difference", "z500", "a") == pytest.approx([1.9 / 2.0 - 1] * 2)


def test_scores_of_ensembles_and_winds_are_combined() -> None:
    channels = [Channel(f"{name}500", name, 500.0, "prognostic") for name in ("u", "v", "t")]
    table = make_page_table(channels, "other", members=4, wind=True)
    pair = combine_pair([table, table], "this", "other")
    rows = scorecard_rows(pair)
    assert {row.score for row in rows} == {row.score for row in scorecard_rows(table)} >= {"rmse", "crps"}
    assert any(row.is_wind for row in rows)
    number = table.dataset["reference"].values.tolist().index("other")
    earlier = scorecard_values(table, rows, "difference")[number]
    later = scorecard_values(pair, rows, "difference")[0]
    assert np.isfinite(later).any()
    np.testing.assert_allclose((1 + later) * (1 + earlier), np.where(np.isnan(earlier), np.nan, 1.0))


def test_the_best_of_three_must_beat_the_second() -> None:
    def tables(c: float) -> dict[tuple[str, str], ScoreTable]:
        return {
            ("a", "s"): make_table({"a": 2.0, "b": 1.0, "c": c}),
            ("b", "s"): make_table({"b": 1.0, "c": c}),
            ("c", "s"): make_table({"c": c}),
        }

    assert ComparisonScores(["a", "b", "c"], tables(1.5)).result_rows()[0].best == "b"
    # b and c are equally good; both are better than a.
    assert ComparisonScores(["a", "b", "c"], tables(1.0001)).result_rows()[0].best is None
    # A run without scores is left out.
    scores = ComparisonScores(["x", "b", "c"], {key: table for key, table in tables(1.5).items() if key[0] != "a"})
    assert scores.names == ["b", "c"] and list(scores.pairs) == [("b", "c")]
    # A run that is left alone is not marked as the best.
    scores = ComparisonScores(["x", "c"], {key: table for key, table in tables(1.5).items() if key[0] == "c"})
    assert scores.names == ["c"] and scores.result_rows()[0].best is None


def test_the_files_agree_with_the_scores(tmp_path: Path) -> None:
    scores = make_scores([2.0, 2.2, 2.1], [1.0, 1.1, 1.05])
    budget = parse_budget("steps", "60")
    curves = [StabilityCurve("b", "seed_0", "z500", "field", [1.0, 2.0], [1.0, float("nan")])]
    costs = {("a", "seed_0"): RunCosts(samples=8, device="cpu"), ("b", "seed_0"): RunCosts(samples=16, device="cpu")}
    outcome = CompareOutcome(
        [make_run("a"), make_run("b")], {"a": 60, "b": 60}, {}, scores, costs, curves, ["train <c> failed"]
    )
    document = build_document(outcome, budget)
    write_json(document, tmp_path / "compare.json")
    assert json.loads((tmp_path / "compare.json").read_text()) == document
    result = document["results"][0]
    assert result["significantly_best"] == "b"
    assert result["rmse_over_persistence"]["a"]["mean"] == pytest.approx(2.1 / PERSISTENCE)
    assert document["comparisons"][0]["difference"] == pytest.approx(-0.5) and document["comparisons"][0]["significant"]
    assert document["stability"][0]["exit_day"] == 2.0 and document["stability"][0]["ratios"] == [1.0, None]
    assert document["warnings"] == ["The runs were trained on different numbers of samples: a 8, b 16."]

    write_csv(outcome, tmp_path / "compare.csv")
    with open(tmp_path / "compare.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    values = {}
    for row in rows:
        values[row["run"], row["seed"], row["metric"], row["lead_hours"]] = row["value"]
    assert values["b", "1", "rmse", "24"] == "1.1" and values["b", "highest", "rmse", "48"] == "1.1"
    assert float(values["a", "mean", "rmse", "24"]) == pytest.approx(2.1)
    assert float(values["b", "mean", "rmse_difference", "24"]) == pytest.approx(-0.5)
    assert values["persistence", "", "rmse", "24"] == "4" and values["b", "0", "long_run_exit_day:field", ""] == "2"

    page = write_comparison_page(outcome, budget, document, tmp_path).read_text()
    assert '<td class="best">0.263<span class="range">0.250 to 0.275</span></td>' in page
    assert "Missing: train &lt;c&gt; failed" in page and "different numbers of samples" in page
    assert "60 steps" in page and page.count("data:image/png") == 3
    assert [row["is_first"] for row in tabulate_results(scores)] == [True, False]


def test_a_page_without_scores_names_what_is_missing(tmp_path: Path) -> None:
    outcome = CompareOutcome([make_run("a"), make_run("b")], failures=["train a, seed 1 failed"])
    document = build_document(outcome, None)
    page = write_comparison_page(outcome, None, document, tmp_path).read_text()
    write_csv(outcome, tmp_path / "compare.csv")
    assert "Missing: train a, seed 1 failed" in page and "lengths may differ" in page
    assert document["results"] == []
