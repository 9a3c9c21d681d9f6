"""Tests of the comparison of the model with opponents, on random errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from credit.cli.main import main
from credit.config import dump_config
from credit.config.sections.verification import RESERVED_NAMES
from credit.errors import ConfigError
from credit.verify.significance.bootstrap import count_blocks
from credit.verify.significance.comparison import (
    adjust_scorecard,
    compare_with_best_opponent,
    compare_with_references,
    opponents_by_reference,
)
from credit.verify.statistics.case_statistics import DeterministicStatistics
from tests.unit.verify.conftest import make_config

DAY = 1440
LEADS = np.array([DAY, 10 * DAY])


CASES = 200
DAILY = np.arange(CASES) * DAY


def draw_squared_errors(sizes: np.ndarray, seed: int = 0, common: np.ndarray | float = 1.0) -> np.ndarray:
    """Return squared errors of daily cases with the means `sizes` (X,), which are equal at two lead times."""
    return sizes[:, None] * np.random.default_rng(seed).gamma(4.0, 0.25, (CASES, 2, len(sizes), 1)) * common


def compare_and_adjust(model: np.ndarray, rivals: list, leads: np.ndarray = LEADS) -> dict[str, np.ndarray]:
    """Return the comparison of root-mean-square errors, adjusted as one scorecard."""
    results = compare_with_best_opponent(DAILY, model, rivals, leads, power=0.5)
    blocks = np.array([[count_blocks(DAILY, lead) for lead in leads.tolist()]])
    (adjusted_values,) = adjust_scorecard([results["p_value"][None, None]], blocks)
    return results | {name: values[0, 0] for name, values in adjusted_values.items()}


def test_the_best_opponent_is_chosen_score_by_score() -> None:
    model = draw_squared_errors(np.array([1.0, 1.0, 1.0]))
    rivals = [
        (draw_squared_errors(np.array([4.0, 2.0, 9.0]), seed=1), [0, 1, 2]),
        (draw_squared_errors(np.array([2.0, 4.0]), seed=2), [0, 1]),
    ]
    results = compare_and_adjust(model, rivals)
    best = [rivals[1][0][:, :, 0], rivals[0][0][:, :, 1], rivals[0][0][:, :, 2]]
    for row, opponent in enumerate(best):
        expected = np.sqrt(model[:, :, row].mean(0) / opponent.mean(0)) - 1
        np.testing.assert_allclose(results["difference"][row], expected)
    assert results["significant"][:, 0].all()  # 40 blocks
    assert not results["significant"][:, 1].any()  # 16 blocks of 12 days
    assert (results["p_value"][:, 1] < 0.01).all()
    assert np.isnan(results["p_adjusted"][:, 1]).all()


def test_the_interval_of_a_difference_is_relative_to_the_opponent() -> None:
    """Compare with Student's t of the means of 40 blocks of 5 days, for a mean and for the root of a mean."""
    model = draw_squared_errors(np.array([0.9]))
    rival = draw_squared_errors(np.array([1.0]), seed=1)
    block_means = (model - rival)[:, 0, 0, 0].reshape(40, 5).mean(axis=1)
    r = max(np.corrcoef(block_means[1:], block_means[:-1])[0, 1], 0.0)
    half_width = stats.t.ppf(0.975, 39) * stats.sem(block_means) * np.sqrt((1 + r) / (1 - r))
    for power in (1.0, 0.5):
        results = compare_with_best_opponent(DAILY, model, [(rival, [0])], LEADS[:1], power)
        for name, distance in (("difference_low", -half_width), ("difference", 0.0), ("difference_high", half_width)):
            expected = (1 + (block_means.mean() + distance) / rival[:, 0].mean()) ** power - 1
            assert results[name].item() == pytest.approx(expected, abs=2e-3)


def test_an_interval_ends_at_a_score_of_0() -> None:
    model = draw_squared_errors(np.array([1.0]))
    rival = draw_squared_errors(np.array([1.0]), seed=1)
    model[0] = 1e3
    results = compare_with_best_opponent(DAILY, model, [(rival, [0])], LEADS[:1], power=0.5)
    assert results["difference_low"].item() == -1.0
    assert results["difference_high"].item() > results["difference"].item()


def test_pairing_removes_variations_that_both_errors_share() -> None:
    """The weather makes both errors large or small; a difference of 2 % is significant nevertheless."""
    weather = np.exp(np.random.default_rng(7).standard_normal((200, 2, 1, 1)))
    model = draw_squared_errors(np.array([0.96]), common=weather)
    rival = draw_squared_errors(np.array([1.0]), common=weather)  # The noise is the same, too, because the seed is.
    assert compare_and_adjust(model, [(rival, [0])])["significant"][0, 0]
    other_weather = weather[::-1]
    rival = draw_squared_errors(np.array([1.0]), common=other_weather)
    assert not compare_and_adjust(model, [(rival, [0])])["significant"][0, 0]


def test_the_false_discovery_rate_is_controlled() -> None:
    """Uncorrected tests find differences in about 20 of 400 equal scores."""
    results = compare_and_adjust(
        draw_squared_errors(np.ones(400)), [(draw_squared_errors(np.ones(400), seed=1), range(400))], LEADS[:1]
    )
    assert (results["p_value"] < 0.05).sum() > 8
    assert not results["significant"].any()


def test_rows_without_an_opponent_have_no_comparison() -> None:
    results = compare_and_adjust(draw_squared_errors(np.ones(2)), [(draw_squared_errors(np.ones(1), seed=1), [1])])
    assert all(np.isnan(results[name][0]).all() for name in ("difference", "p_value", "n_eff", "p_adjusted"))
    assert not results["significant"][0].any()
    assert np.isfinite(results["p_value"][1]).all()
    equal_results = compare_and_adjust(draw_squared_errors(np.ones(2)), [(draw_squared_errors(np.ones(2)), [0, 1])])
    assert (equal_results["difference"] == 0).all()
    assert (equal_results["p_value"] == 1).all()


def test_every_reference_and_season_is_compared() -> None:
    names = ("model", "old", "persistence", "damped_persistence", "climatology")
    assert opponents_by_reference(names) == {
        "best_baseline": ("persistence", "damped_persistence", "climatology"), "old": ("old",)
    }  # fmt: skip
    sums = {}
    for number, name in enumerate(names):
        squared_errors = draw_squared_errors(np.full(2, 1.0 + number), seed=number)
        sums[name] = (
            DeterministicStatistics(DAILY, *(squared_errors for _ in DeterministicStatistics.array_names())),
            [0, 1],
        )
    winter = np.arange(CASES) < 60
    seasons = {"all": np.ones(CASES, dtype=bool), "DJF": winter}
    results = compare_with_references(
        sums, seasons, LEADS, lambda cases, chosen: cases.squared_error[chosen], power=0.5
    )
    assert results["p_value"].shape == (2, 2, 2, 2, 1)
    winter_results = compare_with_best_opponent(
        DAILY[winter], sums["model"][0].squared_error[winter], [(sums["old"][0].squared_error[winter], [0, 1])], LEADS
    )
    np.testing.assert_array_equal(results["p_value"][1, 1], winter_results["p_value"])
    assert results["difference"][1, 0] == pytest.approx(np.sqrt(1 / 2) - 1, abs=0.05)


def test_several_scores_are_adjusted_as_one_scorecard() -> None:
    """The result for 60 equal and 20 different pairs is the same for one array of tests and for two."""
    model = draw_squared_errors(np.ones(80))
    rival = draw_squared_errors(np.concatenate([np.ones(60), np.full(20, 2.0)]), seed=1)
    p = compare_with_best_opponent(DAILY, model, [(rival, range(80))], LEADS)["p_value"][None, None]
    blocks = np.array([[40, 16]])
    (scorecard,) = adjust_scorecard([p], blocks)
    parts = adjust_scorecard([p[:, :, :50], p[:, :, 50:]], blocks)
    for name, values in scorecard.items():
        np.testing.assert_array_equal(values, np.concatenate([part[name] for part in parts], axis=2))
    assert scorecard["significant"][0, 0, 60:, 0].all()
    assert not scorecard["significant"][..., 1, :].any()
    expected = stats.false_discovery_control(p[0, 0, :, 0, 0], method="bh")
    np.testing.assert_allclose(scorecard["p_adjusted"][0, 0, :, 0, 0], expected, rtol=1e-12)


def test_p_value_equals_scipys_paired_t_test() -> None:
    """With a case every ten days and alternating differences, the test is Student's t test for paired samples."""
    initial = np.arange(30) * 10 * DAY
    rng = np.random.default_rng(0)
    model, rival = (
        1 + rng.random((30, 1, 1, 1)) + size * (-1.0) ** np.arange(30)[:, None, None, None] for size in (0.5, 0.1)
    )
    results = compare_with_best_opponent(initial, model, [(rival, [0])], LEADS[:1])
    expected = stats.ttest_rel(model[:, 0, 0, 0], rival[:, 0, 0, 0])
    assert results["p_value"].item() == pytest.approx(expected.pvalue, rel=1e-10)
    assert results["difference"].item() == pytest.approx(model.mean() / rival.mean() - 1)


@pytest.mark.parametrize("name", [*RESERVED_NAMES, "Climatology", "damped persistence"])
def test_reserved_forecast_names_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(
        ConfigError,
        match=rf'verification.*other_forecasts: "{name}" is reserved .* choose a different name',
    ):
        make_config(tmp_path, other_forecasts={name: "/nowhere"})
    first_run = make_config(tmp_path / "own")
    second_run = make_config(tmp_path / "other")
    for config, experiment in ((first_run, "waves"), (second_run, name.replace(" ", "_"))):
        Path(config.save_loc).mkdir()
        text = dump_config(config.model_copy(update={"experiment": experiment}))
        (Path(config.save_loc) / "config.yml").write_text(text)
    assert main(["verify", str(tmp_path / "own" / "config.yml"), str(tmp_path / "other")]) == 2
    assert "is the name of another forecast here; set a different experiment in its config" in capsys.readouterr().err
