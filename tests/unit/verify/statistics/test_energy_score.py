"""Tests of the energy score, against `scoringrules`, the CRPS, and closed forms of its expectation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.unit.verify.ensembles import compute_crps_by_cell, compute_energy_score_by_cell, is_mean_consistent


def _draw_vectors(members: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return members (M, 2, N) and truth (2, N)."""
    values = np.random.default_rng(seed).standard_normal((members + 1, 2, 300)) * 3 + 5
    return values[1:], values[0]


@pytest.mark.parametrize("count", [2, 5, 12])
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-9), (np.float32, 1e-6)])
def test_the_library_agrees(count: int, dtype: type, rtol: float) -> None:
    """Lengths are computed with the precision of the fields."""
    scoringrules = pytest.importorskip("scoringrules")
    members, truth = (values.astype(dtype) for values in _draw_vectors(count))
    for score, estimator in zip(compute_energy_score_by_cell(members, truth), ("nrg", "fair"), strict=True):
        component_last_fields = np.moveaxis(truth, 0, -1), np.moveaxis(members, (0, 1), (-2, -1))
        expected = scoringrules.es_ensemble(
            *(fields.astype(float) for fields in component_last_fields), estimator=estimator
        )
        np.testing.assert_allclose(score.mean(), expected.mean(), rtol=rtol)
        np.testing.assert_allclose(score, expected, rtol=rtol, atol=rtol if dtype == np.float32 else 0)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_energy_score_of_one_component_is_the_crps(count: int) -> None:
    members, truth = _draw_vectors(count)
    members[:, 1] = truth[1] = 0.0
    for energy, crps in zip(
        compute_energy_score_by_cell(members, truth), compute_crps_by_cell(members[:, 0], truth[0]), strict=True
    ):
        np.testing.assert_allclose(energy, crps, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("count", [2, 4, 10])
def test_only_the_fair_score_has_the_expectation_of_the_distribution(count: int) -> None:
    """In two dimensions, the mean distance of two draws of N(0, 1) is sqrt(pi); 40 000 draws, 4 standard errors."""
    rng = np.random.default_rng(count)
    standard, fair = compute_energy_score_by_cell(
        rng.standard_normal((count, 2, 40_000)), rng.standard_normal((2, 40_000))
    )
    assert is_mean_consistent(fair, math.sqrt(math.pi) / 2)
    assert is_mean_consistent(standard, math.sqrt(math.pi) / 2 * (1 + 1 / count))
    assert not is_mean_consistent(standard, math.sqrt(math.pi) / 2)
