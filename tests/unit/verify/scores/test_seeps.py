"""Tests of SEEPS, against `scores`, and of its equitability."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from credit.verify.scores.seeps import DRY_BELOW_MM, SeepsStatistics, compute_seeps_penalty, is_seeps_defined
from tests.unit.verify.ensembles import CELLS, CHANNELS, MEANS, NAMES, WEIGHTS

CASES = 4
SHAPE = (len(CHANNELS), CELLS)


def _draw_fields() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return forecast and truth (K, C, N), probability of dry and threshold of heavy (C, N)."""
    rng = np.random.default_rng(0)
    forecast, truth = np.maximum(rng.gamma(0.6, 5.0, (2, CASES, *SHAPE)) - 0.5, 0.0)
    truth[:, :, :3] = DRY_BELOW_MM  # the smallest wet amount
    return forecast, truth, rng.uniform(0.02, 0.98, SHAPE), rng.uniform(1.0, 6.0, SHAPE)


def _compute_statistics(case_range: range) -> SeepsStatistics:
    forecast, truth, dry, heavy = _draw_fields()
    sums = SeepsStatistics.empty(1440 * np.array(case_range), 1, len(CHANNELS), len(NAMES))
    for number, case in enumerate(case_range):
        for c in range(len(CHANNELS)):
            sums.add((number, 0, c), MEANS, c, forecast[case, c][None], truth[case, c], dry[c], heavy[c])
    return sums


def test_the_library_agrees() -> None:
    scores = pytest.importorskip("scores")
    names = ("case", "channel", "cell")
    forecast, truth, dry, heavy = _draw_fields()
    limits = [xr.DataArray(values, dims=names[1:]) for values in (dry, heavy)]
    penalties = scores.categorical.seeps(
        xr.DataArray(forecast, dims=names),
        xr.DataArray(truth, dims=names),
        *limits,
        dry_light_threshold=np.nextafter(DRY_BELOW_MM, 0),  # in the library, the limit itself is dry
        preserve_dims="all",
    )
    penalty = compute_seeps_penalty(forecast, truth, dry, heavy)
    assert 0.1 < np.isnan(penalty).mean() < 0.4
    np.testing.assert_allclose(penalty, penalties, rtol=1e-12)
    valid = xr.DataArray(MEANS.valid_CP, dims=names[1:])
    score = penalties.where(valid).weighted(WEIGHTS).mean(["case", "cell"]).transpose("channel", "region")
    np.testing.assert_allclose(_compute_statistics(range(CASES)).metrics()["seeps"][0], score, rtol=1e-9)


@pytest.mark.parametrize("dry", [0.1, 0.3, 0.5, 0.85])
def test_seeps_is_equitable(dry: float) -> None:
    """The expected penalty is 1 for a constant forecast and for a draw of the climatology, 0 for a perfect one."""
    amounts = np.array([0.0, 1.0, 9.0])
    probabilities = np.array([dry, (1 - dry) * 2 / 3, (1 - dry) / 3])
    penalty = compute_seeps_penalty(amounts[:, None], amounts, np.full((3, 3), dry), np.full((3, 3), 5.0))
    assert np.diag(penalty).tolist() == [0, 0, 0]
    np.testing.assert_allclose(penalty @ probabilities, 1, rtol=1e-12)
    np.testing.assert_allclose(probabilities @ penalty @ probabilities, 1, rtol=1e-12)


def test_the_penalty_matrix_of_one_climate() -> None:
    """p1 = 2/5, p3 = 1/5; rows are forecasts; halves of 1/p1 = 5/2, 1/(1-p1) = 5/3, 1/p3 = 5, 1/(1-p3) = 5/4."""
    amounts = np.array([0.0, 1.0, 9.0])
    expected = np.array([[0, 5 / 3, 5 / 3 + 5], [5 / 2, 0, 5], [5 / 2 + 5 / 4, 5 / 4, 0]]) / 2
    np.testing.assert_allclose(
        compute_seeps_penalty(amounts[:, None], amounts, np.full(3, 0.4), np.full(3, 5.0)), expected
    )


def test_limits_of_the_categories_and_of_the_climates() -> None:
    assert is_seeps_defined(np.array([0.0999, 0.1, 0.85, 0.8501, np.nan])).tolist() == [False, True, True, False, False]
    just_dry = np.nextafter(DRY_BELOW_MM, 0)
    ones = np.ones(2)
    assert (compute_seeps_penalty(np.array([DRY_BELOW_MM, 5.0]), 1.0 * ones, 0.5 * ones, 5 * ones) == 0).all()
    assert (
        compute_seeps_penalty(np.array([just_dry, np.nextafter(5.0, 6)]), 1.0 * ones, 0.5 * ones, 5 * ones) > 0
    ).all()


def test_missing_values_have_no_penalty() -> None:
    values = [np.full(4, value) for value in (1.0, 1.0, 0.5, 5.0)]
    for number, value in enumerate(values):
        value[number] = np.nan
    assert np.isnan(compute_seeps_penalty(*values)).all()


def test_seeps_of_an_ensemble_is_the_mean_over_members() -> None:
    forecast, truth, dry, heavy = _draw_fields()
    sums = SeepsStatistics.empty(np.zeros(1), 1, 1, len(NAMES), CASES)
    sums.add((0, 0, 0), MEANS, 0, forecast[:, 0], truth[0, 0], dry[0], heavy[0])
    sums_by_member = SeepsStatistics.empty(1440 * np.arange(CASES), 1, 1, len(NAMES))
    for member in range(CASES):
        sums_by_member.add((member, 0, 0), MEANS, 0, forecast[member : member + 1, 0], truth[0, 0], dry[0], heavy[0])
    np.testing.assert_allclose(sums.metrics()["seeps"], sums_by_member.metrics()["seeps"], rtol=1e-12)


def test_parts_are_joined_and_a_dry_region_has_no_score() -> None:
    all_cases = _compute_statistics(range(CASES))
    joined = SeepsStatistics.join([_compute_statistics(range(1, CASES)), _compute_statistics(range(1))])
    np.testing.assert_array_equal(joined.penalty, all_cases.penalty)
    sums = SeepsStatistics.empty(np.zeros(1), 1, len(CHANNELS), len(NAMES))
    dry = np.where(np.repeat(np.arange(8), 16) < 4, 0.95, 0.5)
    for c in range(len(CHANNELS)):
        sums.add((0, 0, c), MEANS, c, np.zeros((1, CELLS)), np.ones(CELLS), dry, np.full(CELLS, 5.0))
    score = sums.metrics()["seeps"][0]
    assert np.isnan(score[:, NAMES.index("extratropics_north")]).all()
    # The forecast is dry and the truth is light rain: half of 1 / (1 - p1).
    np.testing.assert_allclose(score[:, NAMES.index("global")], 1.0)
