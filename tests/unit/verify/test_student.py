"""Against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from credit.verify.student import false_discovery, two_sided_p, two_sided_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 19, 20, 51, 364])
def test_students_t(freedom: int) -> None:
    t = np.array([0.0, -0.3, 1.0, 2.5, -7.0, 40.0])
    np.testing.assert_allclose(two_sided_p(t, freedom), 2 * scipy.stats.t.sf(np.abs(t), freedom), atol=1e-14)
    for inside in (0.5, 0.95, 0.999):
        expected = scipy.stats.t.ppf((1 + inside) / 2, freedom)
        assert two_sided_quantile(inside, freedom) == pytest.approx(expected, rel=1e-9)
    assert np.isnan(two_sided_p(np.array(np.nan), freedom))
    assert two_sided_p(np.array(np.inf), freedom) == 0


def test_false_discovery() -> None:
    p = np.random.default_rng(3).random((6, 20)) ** 3
    p[2, 3] = p[4, 5]  # a tie
    expected = scipy.stats.false_discovery_control(p.ravel()).reshape(p.shape)
    np.testing.assert_allclose(false_discovery(p), expected, rtol=1e-13)
    p[0, ::2] = np.nan
    known = ~np.isnan(p)
    np.testing.assert_allclose(false_discovery(p)[known], scipy.stats.false_discovery_control(p[known]), rtol=1e-13)
    assert np.isnan(false_discovery(p)[~known]).all()
    assert np.isnan(false_discovery(np.full((2, 2), np.nan))).all()
