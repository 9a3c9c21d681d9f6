"""The model against its opponents, on errors that are made."""

from __future__ import annotations

import numpy as np
import pytest

from credit.verify.comparison import compare, compare_all, references
from credit.verify.sums import ScoreSums

DAY = 1440
LEADS = np.array([DAY, 10 * DAY])


CASES = 200
DAILY = np.arange(CASES) * DAY


def squares(sizes: np.ndarray, seed: int = 0, common: np.ndarray | float = 1.0) -> np.ndarray:
    """Return squared errors of daily cases with the means `sizes` (X,), the same at two leads."""
    return sizes[:, None] * np.random.default_rng(seed).gamma(4.0, 0.25, (CASES, 2, len(sizes), 1)) * common


def test_the_best_opponent_is_chosen_score_by_score() -> None:
    model = squares(np.array([1.0, 1.0, 1.0]))
    rivals = [(squares(np.array([4.0, 2.0, 9.0]), seed=1), [0, 1, 2]), (squares(np.array([2.0, 4.0]), seed=2), [0, 1])]
    found = compare(DAILY, model, rivals, LEADS)
    best = [rivals[1][0][:, :, 0], rivals[0][0][:, :, 1], rivals[0][0][:, :, 2]]
    for row, opponent in enumerate(best):
        expected = np.sqrt(model[:, :, row].mean(0) / opponent.mean(0)) - 1
        np.testing.assert_allclose(found["rmse_difference"][row], expected)
    assert found["significant"][:, 0].all()  # 40 blocks
    assert not found["significant"][:, 1].any()  # 16 blocks of 12 days
    assert (found["p_value"][:, 1] < 0.01).all() and np.isnan(found["p_adjusted"][:, 1]).all()


def test_pairing_sees_what_is_common_to_both() -> None:
    """Weather makes both errors large or small; a difference of 2 % shows all the same."""
    weather = np.exp(np.random.default_rng(7).standard_normal((200, 2, 1, 1)))
    model = squares(np.array([0.96]), common=weather)
    rival = squares(np.array([1.0]), common=weather)  # the same noise, too
    assert compare(DAILY, model, [(rival, [0])], LEADS)["significant"][0, 0]
    other_weather = weather[::-1]
    rival = squares(np.array([1.0]), common=other_weather)
    assert not compare(DAILY, model, [(rival, [0])], LEADS)["significant"][0, 0]


def test_few_discoveries_are_false() -> None:
    """Of 400 equal scores, uncorrected tests would call some 20 different."""
    found = compare(DAILY, squares(np.ones(400)), [(squares(np.ones(400), seed=1), range(400))], LEADS[:1])
    assert (found["p_value"] < 0.05).sum() > 8
    assert not found["significant"].any()


def test_rows_without_an_opponent_have_no_comparison() -> None:
    found = compare(DAILY, squares(np.ones(2)), [(squares(np.ones(1), seed=1), [1])], LEADS)
    assert all(np.isnan(found[name][0]).all() for name in ("rmse_difference", "p_value", "n_eff", "p_adjusted"))
    assert not found["significant"][0].any() and np.isfinite(found["p_value"][1]).all()
    same = compare(DAILY, squares(np.ones(2)), [(squares(np.ones(2)), [0, 1])], LEADS)
    assert (same["rmse_difference"] == 0).all() and (same["p_value"] == 1).all()


def test_every_reference_and_season() -> None:
    names = ("model", "old", "persistence", "damped_persistence", "climatology")
    assert references(names) == {
        "best_baseline": ("persistence", "damped_persistence", "climatology"), "old": ("old",)
    }  # fmt: skip
    sums = {}
    for number, name in enumerate(names):
        own = squares(np.full(2, 1.0 + number), seed=number)
        sums[name] = ScoreSums(DAILY, *(own for _ in ScoreSums.plane_names())), [0, 1]
    winter = np.arange(CASES) < 60
    found = compare_all(sums, {"all": np.ones(CASES, dtype=bool), "DJF": winter}, LEADS)
    assert found["p_value"].shape == (2, 2, 2, 2, 1)
    part = compare(DAILY[winter], sums["model"][0].squared[winter], [(sums["old"][0].squared[winter], [0, 1])], LEADS)
    np.testing.assert_array_equal(found["p_value"][1, 1], part["p_value"])
    assert found["rmse_difference"][1, 0] == pytest.approx(np.sqrt(1 / 2) - 1, abs=0.05)
