"""Tests that a network on divided fields gives the outputs and gradients of one process, in float64."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parallel.domain import network_worker, networks
from tests.parallel.forked import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CASES = [
    (num_ranks, f"{name} {num_parts}")
    for num_ranks, shapes in networks.PARTS.items()
    for num_parts in shapes
    for name in networks.CASES
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Number of ranks -> differences that these ranks measured."""
    folder = tmp_path_factory.mktemp("domain")
    results = {}
    for num_ranks in networks.PARTS:
        launch("tests.parallel.domain.network_worker", num_ranks, str(folder), timeout=600)
        results[num_ranks] = json.loads((folder / f"{num_ranks}.json").read_text())
    return results


@pytest.mark.parametrize(("num_ranks", "case"), CASES)
def test_divided_fields_give_outputs_and_gradients_of_one_process(
    num_ranks: int, case: str, results: dict[int, Any]
) -> None:
    errors = results[num_ranks]["cases"][case]
    assert errors["output"] < 1e-12, errors
    assert errors["input_gradient"] < 1e-12, errors
    assert errors["gradients"] < 1e-9, errors


@pytest.mark.parametrize("name", network_worker.COMPILED)
def test_compiled_blocks_give_outputs_and_gradients_of_one_process(name: str, results: dict[int, Any]) -> None:
    errors = results[2]["compiled"][name]
    assert errors["output"] < 1e-12, errors
    assert errors["input_gradient"] < 1e-12, errors
    assert errors["gradients"] < 1e-9, errors


def test_compiled_dropout_on_divided_fields_is_refused(results: dict[int, Any]) -> None:
    assert "dropout as noise cannot be compiled" in results[2]["refusal"]


@pytest.mark.parametrize("num_ranks", networks.PARTS)
def test_post_processes_of_divided_fields_equal_those_of_whole_fields(num_ranks: int, results: dict[int, Any]) -> None:
    """Hyperdiffusion computes in float32. Budgets sum fields of float32 in float64."""
    errors_by_case = results[num_ranks]["postprocesses"]
    assert len(errors_by_case) == 3 * len(networks.PARTS[num_ranks])
    for name, errors in errors_by_case.items():
        assert errors["output"] < 1e-6 and errors["gradient"] < 1e-5, (name, errors)


@pytest.mark.parametrize("mutation", network_worker.MUTATIONS)
def test_comparison_finds_broken_rule(mutation: str, results: dict[int, Any]) -> None:
    """If the comparison missed a broken rule, the tests above could pass for the wrong reason."""
    errors = results[2]["mutations"][mutation]
    assert max(errors.values()) > 1e-5, errors
