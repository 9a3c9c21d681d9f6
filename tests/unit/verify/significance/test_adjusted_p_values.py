"""Tests of adjusted p-values: missing values do not count as tests."""

from __future__ import annotations

import numpy as np
import scipy.stats

from credit.verify.significance.comparison import adjust_p_values


def test_missing_tests_do_not_count() -> None:
    p_values = np.random.default_rng(3).random((6, 20)) ** 3
    p_values[2, 3] = p_values[4, 5]  # a tie
    p_values[0, ::2] = np.nan
    is_tested = ~np.isnan(p_values)
    expected = scipy.stats.false_discovery_control(p_values[is_tested])
    np.testing.assert_allclose(adjust_p_values(p_values)[is_tested], expected, rtol=1e-13)
    assert np.isnan(adjust_p_values(p_values)[~is_tested]).all()


def test_nothing_tested_gives_nothing() -> None:
    assert np.isnan(adjust_p_values(np.full((2, 2), np.nan))).all()
