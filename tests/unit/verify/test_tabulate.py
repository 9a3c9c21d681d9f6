"""From sums to table, rows and scorecard: three quarters of a year of made-up sums."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from credit.channels import Channel
from credit.times import Clock
from credit.verify.blocks import intervals
from credit.verify.plots_scores import scorecard, skill_curves
from credit.verify.seasons import cases_by_season
from credit.verify.sums import ScoreSums
from credit.verify.table import FACTS, ScoreTable
from credit.verify.tabulate import Rows, build_table
from tests.unit.analytic_reader import ATTRIBUTES

CLOCK = Clock()
INITIAL = CLOCK.parse("2001-01-01") + 1440 * np.arange(270)
LEADS = np.array([360, 1440, 14400])
CHANNELS = [Channel(f"{name}500", name, 500.0, "prognostic") for name in ("u", "v", "t")]
ROWS = Rows(CHANNELS, [(0, 1, "wind")], ATTRIBUTES)
SIZES = {"model": 1.0, "other": 1.0, "persistence": 2.0, "damped_persistence": 1.5, "climatology": 3.0}


def make_sums(size: float, seed: int, rows: int = 4) -> ScoreSums:
    """Return sums with squared errors of about `size`, of 2 regions."""
    rng = np.random.default_rng(seed)
    shape = len(INITIAL), len(LEADS), rows, 2
    planes = {name: rng.gamma(5.0, 0.2 * size, shape) for name in ScoreSums.plane_names()}
    planes["covariance"] = 0.8 * np.sqrt(planes["forecast_variance"] * planes["truth_variance"])
    return ScoreSums(INITIAL, *(planes[name] for name in ScoreSums.plane_names()))


@pytest.fixture(scope="module")
def sums() -> dict[str, tuple[ScoreSums, list[int]]]:
    """The other forecast has u, v and hence the wind, but no t."""
    return {
        name: (make_sums(size, seed, 3), [0, 1, 3]) if name == "other" else (make_sums(size, seed), [0, 1, 2, 3])
        for seed, (name, size) in enumerate(SIZES.items())
    }


@pytest.fixture(scope="module")
def table(sums: dict[str, tuple[ScoreSums, list[int]]]) -> ScoreTable:
    facts = {"n_cases": len(INITIAL), "level_units": "hPa", "initial_times": "here to there"} | dict.fromkeys(
        FACTS, "x"
    )
    return build_table(sums, ROWS, LEADS, cases_by_season(INITIAL, CLOCK), ["global", "tropics"], facts)


def test_scores_of_a_season_are_those_of_its_cases(sums: dict, table: ScoreTable) -> None:
    assert table.seasons == ["all", "DJF", "MAM", "JJA", "SON"]
    assert table.dataset["n_cases"].values.tolist() == [270, 59, 92, 92, 27]
    assert table.dataset["n_blocks"].values.tolist() == [[54, 54, 22], [11, 11, 4], [18, 18, 7], [18, 18, 7], [5, 5, 2]]
    own = sums["persistence"][0].select(cases_by_season(INITIAL, CLOCK)["JJA"])
    metrics = own.metrics()
    del metrics["crps"]  # is told where there are ensembles
    for name, values in metrics.items():
        expected = values[1, 2, 1]
        assert table.value("persistence", "t500", 24, name, "tropics", "JJA") == expected, name
        wind = {"bias": "wind_speed_bias"}.get(name, f"wind_vector_{name}")
        place = {"forecast": "persistence", "season": "JJA", "lead": 24.0, "region": "tropics"}
        assert float(table.dataset[wind].sel(**place)[0]) == values[1, 3, 1], wind


def test_intervals_stand_beside_the_scores(sums: dict, table: ScoreTable) -> None:
    expected = intervals(sums["other"][0], 2, 14400)["mae"][:, 1, 0]
    found = [table.curve("other", "v500", f"mae_{end}")[2] for end in ("low", "high")]
    np.testing.assert_array_equal(found, expected)
    for forecast in SIZES:
        low, value, high = (table.dataset[name].sel(forecast=forecast) for name in ("rmse_low", "rmse", "rmse_high"))
        assert ((low < value) & (value < high))[0, :2].all() and np.isnan(low[-1]).all()  # SON has too few blocks
    assert np.isnan(table.dataset["acc_low"].sel(forecast="climatology")).all()
    assert np.isnan(table.dataset["rmse"].sel(forecast="other", channel="t500")).all()


def test_rows_of_the_file(table: ScoreTable, tmp_path: Path) -> None:
    table.write(tmp_path)
    with open(tmp_path / "scores.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    # forecasts with a row x metrics x leads x regions x seasons; climatology has neither acc nor acc_wb2
    assert len(rows) == (4 + 3 + 4 * 3) * 8 * 3 * 2 * 5 - 4 * 2 * 3 * 2 * 5
    wanted = {"forecast": "model", "variable": "wind", "region": "tropics", "season": "MAM", "lead_hours": "24"}
    (row,) = (row for row in rows if wanted.items() <= row.items() and row["metric"] == "wind_vector_rmse")
    place = {"forecast": "model", "season": "MAM", "lead": 24.0, "region": "tropics"}
    for column, name in (("value", "rmse"), ("low", "rmse_low"), ("high", "rmse_high")):
        expected = float(table.dataset[f"wind_vector_{name}"].sel(**place)[0])
        assert float(row[column]) == pytest.approx(expected, rel=1e-7)
    assert (row["n_cases"], row["n_blocks"], row["units"], row["level"]) == ("92", "18", "m s-1", "500")
    (row,) = (row for row in rows if wanted.items() <= row.items() and row["metric"] == "wind_vector_activity_ratio")
    assert (row["units"], row["low"]) == ("1", "")


def test_stars_and_hatching_need_twenty_blocks(table: ScoreTable) -> None:
    assert table.compared("significant", "u500").tolist() == [True, True, True]
    assert table.compared("significant", "u500", "other").tolist() == [False, False, False]
    seasons = table.dataset["significant"].any(("reference", "channel", "lead", "region"))
    assert seasons.values.tolist() == [True, False, False, False, False]
    lines = table.format().splitlines()
    assert "1*" in lines[2].replace(f"{table.skill('u500', 6):.2f}", "1") and "54 (first lead) to 22" in lines[-1]
    assert "false discovery rate of 5 %" in lines[-1]


@pytest.mark.parametrize("reference", ["best_baseline", "other"])
def test_the_scorecard_hatches_what_is_significant(table: ScoreTable, reference: str) -> None:
    figure = scorecard(table, reference)
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == ["Global", "Tropics"]
    for axis, region in zip(panels, ("global", "tropics"), strict=True):
        mesh, hatched = axis.collections
        chosen = table.dataset.sel(reference=reference, season="all", region=region)
        expected = np.concatenate([chosen["rmse_difference"], chosen["wind_rmse_difference"]]) * 100
        np.testing.assert_array_equal(np.ma.filled(mesh.get_array(), np.nan), expected)
        assert hatched.get_hatch() == "////"
        assert len(hatched.get_paths()) == int(chosen["significant"].sum() + chosen["wind_significant"].sum())
    assert [text.get_text() for text in panels[0].get_yticklabels()] == ["u500", "v500", "t500", "wind 500"]


def test_curves_are_shaded_between_the_ends(table: ScoreTable) -> None:
    figure = skill_curves(table, ["t500"])
    upper, lower = figure.axes
    assert len(upper.lines) == len(upper.collections) == 4  # the other has no t
    assert len(lower.lines) == 3  # no correlation of climatology
    low = table.curve("model", "t500", "rmse_low")
    assert upper.collections[0].get_paths()[0].vertices[:, 1].min() == pytest.approx(low.min())
