"""Tests that sequence parallelism gives the outputs and reduced gradients of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parallel.domain import sequence_worker
from tests.parallel.forked import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CASES = [(num_ranks, name) for num_ranks, cases in sequence_worker.CASES.items() for name in cases]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Number of ranks -> differences that these ranks measured."""
    folder = tmp_path_factory.mktemp("sequence")
    results = {}
    for num_ranks in sequence_worker.CASES:
        launch("tests.parallel.domain.sequence_worker", num_ranks, str(folder), timeout=600)
        results[num_ranks] = json.loads((folder / f"{num_ranks}.json").read_text())
    return results


@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_sequence_parallelism_gives_outputs_and_gradients_of_one_process(
    num_ranks: int, name: str, results: dict[int, Any]
) -> None:
    errors = results[num_ranks]["cases"][name]
    if sequence_worker.CASES[num_ranks][name].float32:
        assert max(errors.values()) < 1e-5, errors
    else:
        assert max(errors["output"], errors["input_gradient"]) < 1e-12, errors
        assert errors["gradients"] < 1e-9, errors


@pytest.mark.parametrize("mutation", sequence_worker.MUTATIONS)
def test_comparison_finds_broken_step(mutation: str, results: dict[int, Any]) -> None:
    """If the comparison missed a broken step, the test above could pass for the wrong reason."""
    errors = results[2]["mutations"][mutation]
    assert max(errors.values()) > 1e-2, errors
