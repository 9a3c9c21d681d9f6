"""The CRPS against three libraries, its definition, and closed forms of its expectation."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import xarray as xr

from credit.verify.crps import ensemble_crps
from tests.unit.verify.ensembles import rainy, within


def distance_of_normals(mean: float, deviation: float) -> float:
    """Return E|Z| of a normal Z."""
    ratio = mean / deviation
    return deviation * math.sqrt(2 / math.pi) * math.exp(-(ratio**2) / 2) + mean * math.erf(ratio / math.sqrt(2))


def _fields(members: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = 5e4 + 100 * rng.standard_normal((members + 1, 3, 1400))  # more cells than a block has
    return values[1:], values[0]


@pytest.mark.parametrize("count", [2, 3, 10, 51])
@pytest.mark.parametrize("kind", ["continuous", "ties"])
def test_the_libraries_agree(count: int, kind: str) -> None:
    """`scores` (both), `properscoring` (standard) and `scoringrules` (fair)."""
    scores = pytest.importorskip("scores")
    properscoring = pytest.importorskip("properscoring")
    scoringrules = pytest.importorskip("scoringrules")
    members, truth = _fields(count)
    if kind == "ties":
        members, truth = (rainy((values - 5e4) / 100) for values in (members, truth))
    standard, fair = ensemble_crps(members, truth)
    tolerance = {"rtol": 1e-9, "atol": 1e-9 * np.abs(members - truth).mean()}
    labelled = xr.DataArray(members, dims=("member", "channel", "cell")), xr.DataArray(truth, dims=("channel", "cell"))
    for method, ours in (("ecdf", standard), ("fair", fair)):
        theirs = scores.probability.crps_for_ensemble(*labelled, "member", method=method, preserve_dims="all")
        np.testing.assert_allclose(ours, theirs, **tolerance)
    np.testing.assert_allclose(standard, properscoring.crps_ensemble(truth, members, axis=0), **tolerance)
    theirs = scoringrules.crps_ensemble(truth, members, m_axis=0, estimator="fair")
    np.testing.assert_allclose(fair, theirs, **tolerance)


def test_the_definition_by_hand() -> None:
    # errors 1, 1, 4; distances 2, 5, 3: a mean error of 2, and 10 over 9 or 6
    standard, fair = ensemble_crps(np.array([[1.0], [-1.0], [4.0]]), np.array([0.0]))
    assert standard[0] == pytest.approx(2 - 10 / 9)
    assert fair[0] == pytest.approx(2 - 10 / 6)


def test_one_member_has_its_absolute_error_and_no_fair_score() -> None:
    members, truth = _fields(1)
    standard, fair = ensemble_crps(members, truth)
    np.testing.assert_array_equal(standard, np.abs(members[0] - truth))
    assert np.isnan(fair).all()


def test_missing_values_stay_missing() -> None:
    members, truth = _fields(4)
    members[2, 1, 7] = truth[2, 5] = np.nan
    for score in ensemble_crps(members, truth):
        assert np.argwhere(np.isnan(score)).tolist() == [[1, 7], [2, 5]]


def test_float32_members_are_scored_in_float64() -> None:
    members, truth = _fields(10)
    rounded = members.astype(np.float32)
    for ours, exact in zip(ensemble_crps(rounded, truth), ensemble_crps(rounded.astype(float), truth), strict=True):
        assert ours.dtype == np.float64
        np.testing.assert_array_equal(ours, exact)


@pytest.mark.parametrize("count", [2, 3, 5, 20])
def test_only_the_fair_score_is_that_of_the_distribution(count: int) -> None:
    """Truth N(0, 1), members N(0.3, 1.2): expectations are known; 100 000 draws, 4 standard errors."""
    rng = np.random.default_rng(count)
    truth = rng.standard_normal(100_000)
    standard, fair = ensemble_crps(0.3 + 1.2 * rng.standard_normal((count, truth.size)), truth)
    between = distance_of_normals(0, 1.2 * math.sqrt(2))
    exact = distance_of_normals(0.3, math.hypot(1, 1.2)) - between / 2
    assert within(fair, exact)
    assert within(standard, exact + between / (2 * count))
    assert not within(standard, exact)


def test_memory_is_linear_in_members() -> None:
    """All that is held, members included, and without them: a part that does not grow, and one that does so evenly."""
    cells = 20_000

    def peak(count: int, with_members: bool) -> int:
        members = np.random.default_rng(0).random((count, cells))
        tracemalloc.start()
        try:
            ensemble_crps(members.copy() if with_members else members, np.zeros(cells))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    steps = np.diff([peak(count, with_members=True) for count in (20, 40, 60, 80, 100)])
    np.testing.assert_allclose(steps, steps.mean(), rtol=0.02)
    assert steps.mean() < 20 * cells * 8 * 1.7
    # beside them less than one more copy, where pairs would take a hundred
    assert peak(100, with_members=False) < 100 * cells * 8
