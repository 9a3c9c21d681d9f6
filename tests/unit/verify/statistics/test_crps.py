"""Tests of the CRPS, against three libraries, its definition, and closed forms of its expectation."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import xarray as xr

from credit.channels import ChannelMap
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.case_statistics import EnsembleStatistics
from tests.unit.analytic_reader import make_grid
from tests.unit.verify.ensembles import compute_crps_by_cell, is_mean_consistent, to_precipitation


def compute_mean_distance(mean: float, deviation: float) -> float:
    """Return E|Z| of a normal variable Z, such as the difference of two normal variables."""
    ratio = mean / deviation
    return deviation * math.sqrt(2 / math.pi) * math.exp(-(ratio**2) / 2) + mean * math.erf(ratio / math.sqrt(2))


def _draw_fields(members: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return members (M, N) and truth (N,)."""
    rng = np.random.default_rng(seed)
    values = 5e4 + 100 * rng.standard_normal((members + 1, 4200))
    return values[1:], values[0]


@pytest.mark.parametrize("count", [2, 3, 10, 51])
@pytest.mark.parametrize("kind", ["continuous", "ties"])
def test_the_libraries_agree(count: int, kind: str) -> None:
    """`scores` has both scores, `properscoring` the standard one and `scoringrules` the fair one."""
    scores = pytest.importorskip("scores")
    properscoring = pytest.importorskip("properscoring")
    scoringrules = pytest.importorskip("scoringrules")
    members, truth = _draw_fields(count)
    if kind == "ties":
        members, truth = (to_precipitation((values - 5e4) / 100) for values in (members, truth))
    standard, fair = compute_crps_by_cell(members, truth)
    tolerance = {"rtol": 1e-9, "atol": 1e-9 * np.abs(members - truth).mean()}
    labelled_fields = xr.DataArray(members, dims=("member", "cell")), xr.DataArray(truth, dims="cell")
    for method, score in (("ecdf", standard), ("fair", fair)):
        expected = scores.probability.crps_for_ensemble(*labelled_fields, "member", method=method, preserve_dims="all")
        np.testing.assert_allclose(score, expected, **tolerance)
    np.testing.assert_allclose(standard, properscoring.crps_ensemble(truth, members, axis=0), **tolerance)
    expected = scoringrules.crps_ensemble(truth, members, m_axis=0, estimator="fair")
    np.testing.assert_allclose(fair, expected, **tolerance)


def test_crps_of_three_members_by_hand() -> None:
    # The errors 1, 1, 4 have the mean 2. The distances 2, 5, 3 have the sum 10, which is divided by 9 or by 6.
    standard, fair = compute_crps_by_cell(np.array([[1.0], [-1.0], [4.0]]), np.array([0.0]))
    assert standard[0] == pytest.approx(2 - 10 / 9)
    assert fair[0] == pytest.approx(2 - 10 / 6)


def test_one_member_has_its_absolute_error_and_no_fair_score() -> None:
    members, truth = _draw_fields(1)
    standard, fair = compute_crps_by_cell(members, truth)
    np.testing.assert_array_equal(standard, np.abs(members[0] - truth))
    assert np.isnan(fair).all()


def test_missing_values_have_no_score() -> None:
    members, truth = _draw_fields(4)
    members[2, 7] = truth[5] = np.nan
    for score in compute_crps_by_cell(members, truth):
        assert np.flatnonzero(np.isnan(score)).tolist() == [5, 7]


@pytest.mark.parametrize("count", range(1, 34))
def test_any_number_of_members_is_sorted(count: int) -> None:
    """Wrongly sorted members would change the sum of the distances of pairs."""
    values = np.random.default_rng(count).standard_normal((count, 7))
    standard, _ = compute_crps_by_cell(values, np.zeros(7))
    distances = np.abs(values[:, None] - values).sum(axis=(0, 1)) / 2
    np.testing.assert_allclose(standard, np.abs(values).mean(axis=0) - distances / count**2, rtol=1e-12)


def test_float32_members_are_scored_in_float64() -> None:
    members, truth = _draw_fields(10)
    rounded = members.astype(np.float32)
    for score, exact in zip(
        compute_crps_by_cell(rounded, truth), compute_crps_by_cell(rounded.astype(float), truth), strict=True
    ):
        assert score.dtype == np.float64
        np.testing.assert_array_equal(score, exact)


@pytest.mark.parametrize("count", [2, 3, 5, 20])
def test_only_the_fair_score_has_the_expectation_of_the_distribution(count: int) -> None:
    """The truth is N(0, 1), members are N(0.3, 1.2); 100 000 draws give the expectation to 4 standard errors."""
    rng = np.random.default_rng(count)
    truth = rng.standard_normal(100_000)
    standard, fair = compute_crps_by_cell(0.3 + 1.2 * rng.standard_normal((count, truth.size)), truth)
    member_distance = compute_mean_distance(0, 1.2 * math.sqrt(2))
    exact = compute_mean_distance(0.3, math.hypot(1, 1.2)) - member_distance / 2
    assert is_mean_consistent(fair, exact)
    assert is_mean_consistent(standard, exact + member_distance / (2 * count))
    assert not is_mean_consistent(standard, exact)


def test_memory_is_linear_in_members() -> None:
    """The peak is measured with and without the members of a case; it is a constant plus a part per member."""
    grid = make_grid(100, 200)
    channels = ChannelMap.build({"prognostic": {"vars_3D": [], "vars_2D": ["t2m"]}}, []).output
    means = AreaMean(channels, {}, grid.area_weights()[None])
    cells = 20_000

    def measure_peak(count: int, with_members: bool) -> int:
        members = np.random.default_rng(0).random((count, 1, cells))
        sums = EnsembleStatistics.empty(np.zeros(1), 1, means, count)
        tracemalloc.start()
        try:
            case_members = members.copy() if with_members else members
            sums.add_members(0, 0, means, case_members, np.zeros((1, cells)), "test")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    steps = np.diff([measure_peak(count, with_members=True) for count in (20, 40, 60, 80, 100)])
    np.testing.assert_allclose(steps, steps.mean(), rtol=0.02)
    assert steps.mean() < 20 * cells * 8 * 1.1
    # Without the members, the peak is below a tenth of their size. Pairs of members would take 100 times their size.
    assert measure_peak(100, with_members=False) < 10 * cells * 8
