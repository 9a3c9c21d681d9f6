"""Tests of intervals and paired tests, against scipy and on random processes with known scores."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.signal
import scipy.stats

from credit.verify.significance.bootstrap import (
    MIN_BLOCKS_FOR_INTERVALS,
    cases_per_block,
    confidence_intervals,
    count_blocks,
    paired_test,
)
from credit.verify.statistics.case_statistics import DeterministicStatistics

DAY = 1440


def build_sums(initial: np.ndarray, **planes: np.ndarray) -> DeterministicStatistics:
    """Return statistics of one lead time with the given (N, X) values; other statistics are 1."""
    shape = next(iter(planes.values())).shape
    values = {name: np.ones(shape) for name in DeterministicStatistics.array_names()} | planes
    return DeterministicStatistics(
        initial, *(values[name][:, None, :, None] for name in DeterministicStatistics.array_names())
    )


def draw_ar1_series(cases: int, series: int, phi: float, seed: int = 0) -> np.ndarray:
    """Return AR(1) series with variance 1, (cases, series)."""
    noise = np.random.default_rng(seed).standard_normal((cases + 200, series))
    return scipy.signal.lfilter([np.sqrt(1 - phi**2)], [1, -phi], noise, axis=0)[200:]


@pytest.mark.parametrize(
    ("hours", "lead_days", "length"),
    [(24, 1, 5), (24, 3, 5), (24, 4, 6), (24, 10, 12), (6, 1, 20), (36, 1, 4), (240, 3, 1)],
)
def test_a_block_spans_five_days_and_the_lead_time_plus_two(hours: int, lead_days: int, length: int) -> None:
    initial = np.arange(100) * hours * 60
    assert cases_per_block(initial, lead_days * DAY) == length
    assert count_blocks(initial, lead_days * DAY) == 100 // length


def test_blocks_of_uneven_times_are_long_enough() -> None:
    """Initial times have clusters and a gap, as between two winters."""
    initial = np.sort(np.random.default_rng(0).choice(np.arange(0, 400 * DAY, 360), 300, replace=False))
    initial[150:] += 200 * DAY
    length = cases_per_block(initial, DAY)
    assert (initial[length:] - initial[:-length]).min() >= 5 * DAY
    shorter = length - 1
    assert (initial[shorter:] - initial[:-shorter]).min() < 5 * DAY


def test_independent_cases_agree_with_scipys_bootstrap_and_students_interval() -> None:
    initial = np.arange(60) * 10 * DAY
    error = np.random.default_rng(1).standard_normal((60, 1)) + 0.5
    error[1::2] = (
        1.0 - error[::2]
    )  # Neighbours lie on opposite sides of the mean, so they have no positive correlation.
    assert cases_per_block(initial, DAY) == 1
    low, high = confidence_intervals(build_sums(initial, error=error), 0, DAY)["bias"][:, 0, 0]
    t_quantile = scipy.stats.t.ppf(0.975, 59)
    level = 1 - 2 * scipy.stats.norm.cdf(-t_quantile * np.sqrt(60 / 59))
    scipy_interval = scipy.stats.bootstrap(
        (error[:, 0],), np.mean, confidence_level=level, method="percentile", n_resamples=20000, rng=1
    ).confidence_interval
    half_width = t_quantile * error.std(ddof=1) / np.sqrt(60)
    for end, scipy_end, student_end in zip(
        (low, high), scipy_interval, (error.mean() - half_width, error.mean() + half_width), strict=True
    ):
        assert end == pytest.approx(scipy_end, abs=0.12 * half_width)
        assert end == pytest.approx(student_end, abs=0.12 * half_width)


@pytest.mark.parametrize(
    ("cases", "lead_days", "phi", "least"),
    [(365, 1, 0.0, 0.93), (100, 1, 0.0, 0.93), (75, 10, 0.0, 0.93), (365, 1, 0.6, 0.91), (365, 10, 0.6, 0.91),
     (100, 1, 0.6, 0.90), (75, 10, 0.6, 0.91)],
)  # fmt: skip
def test_intervals_cover_the_truth(cases: int, lead_days: int, phi: float, least: float) -> None:
    """About 91 to 97 % of the 95 % intervals contain the known bias, RMSE and MAE of correlated normal errors."""
    error = draw_ar1_series(cases, 600, phi)
    sums = build_sums(np.arange(cases) * DAY, error=error, squared_error=error**2, absolute_error=np.abs(error))
    intervals = confidence_intervals(sums, 0, lead_days * DAY)
    for metric, truth in (("bias", 0.0), ("rmse", 1.0), ("mae", np.sqrt(2 / np.pi))):
        low, high = intervals[metric][..., 0]
        coverage = ((low < truth) & (truth < high)).mean()
        assert least - 0.02 * (metric != "bias") <= coverage <= 0.985, (metric, coverage)


def test_the_interval_of_a_correlation() -> None:
    """Anomalies of independent cells have the correlation 0.8, which the interval must contain."""
    rng = np.random.default_rng(2)
    shape = (120, 400, 30)
    truth = rng.standard_normal(shape)
    forecast = 0.8 * truth + 0.6 * rng.standard_normal(shape)
    sums = build_sums(
        np.arange(120) * DAY,
        forecast_variance=(forecast**2).mean(-1),
        truth_variance=(truth**2).mean(-1),
        covariance=(forecast * truth).mean(-1),
    )
    low, high = confidence_intervals(sums, 0, DAY)["acc"][..., 0]
    assert 0.92 <= ((low < 0.8) & (high > 0.8)).mean() <= 0.98
    # The standard error of a correlation is (1 - rho^2) / sqrt(n), also without centring.
    expected = 2 * 1.96 * 0.36 / np.sqrt(120 * 30)
    assert np.median(high - low) == pytest.approx(expected, rel=0.2)


def test_too_few_blocks_have_no_interval_and_no_test() -> None:
    error = draw_ar1_series(MIN_BLOCKS_FOR_INTERVALS * 5, 2, 0.0)
    initial = np.arange(len(error)) * DAY
    assert np.isfinite(confidence_intervals(build_sums(initial, error=error), 0, DAY)["bias"]).all()
    assert np.isfinite(paired_test(error, 5)).all()
    fewer = build_sums(initial[:-1], error=error[:-1])
    assert all(np.isnan(ends).all() for ends in confidence_intervals(fewer, 0, DAY).values())
    assert np.isnan(paired_test(error[:-1], 5)).all()


def test_paired_test_equals_scipy_if_blocks_are_uncorrelated() -> None:
    difference = np.random.default_rng(4).standard_normal((40, 50)) + 0.2
    p, n_eff, half_width = paired_test(difference, 1)
    r = [np.corrcoef(d[1:], d[:-1])[0, 1] for d in difference.T]
    is_uncorrelated = np.array(r) < -0.05
    expected = scipy.stats.ttest_1samp(difference, 0.0).pvalue
    np.testing.assert_allclose(p[is_uncorrelated], expected[is_uncorrelated], rtol=1e-9)
    np.testing.assert_allclose(n_eff[is_uncorrelated], 40)
    interval = scipy.stats.ttest_1samp(difference, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(
        2 * half_width[is_uncorrelated], (interval.high - interval.low)[is_uncorrelated], rtol=1e-9
    )
    # The interval excludes 0 exactly where the p-value is below 5 %.
    np.testing.assert_array_equal(np.abs(difference.mean(axis=0)) > half_width, p < 0.05)
    assert is_uncorrelated.sum() > 10
    assert (p >= expected - 1e-12).all()
    means = difference.reshape(8, 5, 50).mean(axis=1)
    p = paired_test(difference, 5)[0]
    neighbours = ((means - means.mean(0))[1:] * (means - means.mean(0))[:-1]).sum(axis=0)
    np.testing.assert_allclose(p[neighbours < 0], scipy.stats.ttest_1samp(means, 0.0).pvalue[neighbours < 0], rtol=1e-9)


@pytest.mark.parametrize(("cases", "length", "phi"), [(365, 5, 0.0), (365, 5, 0.6), (365, 12, 0.6), (120, 5, 0.6)])
def test_paired_test_has_the_nominal_error_rate(cases: int, length: int, phi: float) -> None:
    """About 5 % of zero differences are significant; a test for independent cases finds 30 % at phi 0.6."""
    difference = draw_ar1_series(cases, 2000, phi, seed=5)
    p, n_eff, half_width = paired_test(difference, length)
    assert 0.03 <= (p < 0.05).mean() <= 0.08
    assert 0.92 <= (np.abs(difference.mean(axis=0)) < half_width).mean() <= 0.97
    assert np.median(n_eff) == pytest.approx(cases * (1 - phi) / (1 + phi), rel=0.15)
    if phi:
        assert (scipy.stats.ttest_1samp(difference, 0.0).pvalue < 0.05).mean() > 0.25


def test_equal_forecasts_do_not_differ() -> None:
    test = paired_test(np.zeros((40, 3)), 5)
    assert (test.p_value == 1).all()
    assert (test.half_width == 0).all()
    assert (paired_test(np.full((40, 3), 2.0), 5)[0] == 0).all()
