"""The energy score against `scoringrules`, the CRPS, and closed forms of its expectation."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from credit.verify.crps import ensemble_crps
from credit.verify.energy import energy_score
from tests.unit.verify.ensembles import CELLS, within


def _vectors(members: int, components: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return members (M, D, C, N) and truth (D, C, N) of two vectors."""
    values = np.random.default_rng(seed).standard_normal((members + 1, components, 2, CELLS)) * 3 + 5
    return values[1:], values[0]


@pytest.mark.parametrize("count", [2, 5, 12])
@pytest.mark.parametrize("components", [2, 3])
def test_the_library_agrees(count: int, components: int) -> None:
    scoringrules = pytest.importorskip("scoringrules")
    members, truth = _vectors(count, components)
    for ours, estimator in zip(energy_score(members, truth), ("nrg", "fair"), strict=True):
        moved = np.moveaxis(truth, 0, -1), np.moveaxis(members, (0, 1), (-2, -1))
        theirs = scoringrules.es_ensemble(*moved, estimator=estimator)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_of_one_component_it_is_the_crps(count: int) -> None:
    members, truth = _vectors(count, 1)
    for energy, crps in zip(energy_score(members, truth), ensemble_crps(members[:, 0], truth[0]), strict=True):
        np.testing.assert_allclose(energy, crps, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("count", [2, 4, 10])
def test_only_the_fair_score_is_that_of_the_distribution(count: int) -> None:
    """In two dimensions two draws of N(0, 1) are sqrt(pi) apart on average; 40 000 draws, 4 standard errors."""
    rng = np.random.default_rng(count)
    standard, fair = energy_score(rng.standard_normal((count, 2, 40_000)), rng.standard_normal((2, 40_000)))
    assert within(fair, math.sqrt(math.pi) / 2)
    assert within(standard, math.sqrt(math.pi) / 2 * (1 + 1 / count))
    assert not within(standard, math.sqrt(math.pi) / 2)


def test_no_copy_of_the_members_is_made() -> None:
    members, truth = np.zeros((30, 2, 100_000)), np.zeros((2, 100_000))
    tracemalloc.start()
    try:
        energy_score(members, truth)
        assert tracemalloc.get_traced_memory()[1] < 0.25 * members.nbytes
    finally:
        tracemalloc.stop()
