"""A network on divided fields computes the same function as on one process: outputs and gradients in float64."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parallel.domain import network_worker, networks
from tests.parallel.torchrun import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CASES = [
    (num_ranks, f"{name} {num_parts}")
    for num_ranks, shapes in networks.PARTS.items()
    for num_parts in shapes
    for name in networks.CASES
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Number of ranks -> what they have compared."""
    folder = tmp_path_factory.mktemp("domain")
    results = {}
    for num_ranks in networks.PARTS:
        launch("tests.parallel.domain.network_worker", num_ranks, str(folder), timeout=600)
        results[num_ranks] = json.loads((folder / f"{num_ranks}.json").read_text())
    return results


@pytest.mark.parametrize(("num_ranks", "case"), CASES)
def test_divided_fields_give_the_same_function(num_ranks: int, case: str, results: dict[int, Any]) -> None:
    errors = results[num_ranks]["cases"][case]
    assert errors["output"] < 1e-12, errors
    assert errors["input_gradient"] < 1e-12, errors
    assert errors["gradients"] < 1e-9, errors


@pytest.mark.parametrize("mutation", network_worker.MUTATIONS)
def test_a_broken_rule_is_noticed(mutation: str, results: dict[int, Any]) -> None:
    """Without these, the test above could pass for the wrong reason."""
    errors = results[2]["mutations"][mutation]
    assert max(errors.values()) > 1e-5, errors
