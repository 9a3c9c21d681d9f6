"""Training on divided fields gives the numbers of one process, on every mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.domain import training_cases
from tests.parallel.forked import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MESHES_AND_CASES = [(mesh, case) for mesh, names in training_cases.CASES_OF_MESH.items() for case in names]


@pytest.fixture(scope="module")
def results_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what four ranks have computed."""
    folder = tmp_path_factory.mktemp("domain")
    launch("tests.parallel.domain.training_worker", training_cases.NUM_RANKS, str(folder), timeout=900)
    return folder


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, torch.Tensor]]:
    """Results of one process, by case."""
    return {name: training_cases.train_alone(name) for name in training_cases.CASES}


@pytest.mark.parametrize(("mesh", "case"), MESHES_AND_CASES)
def test_training_equals_one_process(mesh: str, case: str, results_folder: Path, one_process: dict) -> None:
    results, expected = load_file(results_folder / f"{mesh}-{case}.safetensors"), one_process[case]
    assert results.keys() == expected.keys()
    limit = 1e-9 if training_cases.CASES[case].double else 1e-5
    for key in ("output", "loss"):
        error = (results[key] - expected[key]).abs().max() / expected[key].abs().max()
        assert error < limit, f"{key}: {error}"
    # The logged norm is float32 in every case; rounding grows from step to step.
    norm_errors = (results["norm"] - expected["norm"]).abs() / expected["norm"]
    assert norm_errors[0] < 1e-5 and norm_errors.max() < 1e-3, norm_errors
    gradient_keys = [key for key in expected if key.startswith("gradient/")]
    total = torch.stack([expected[key].norm() for key in gradient_keys]).norm()
    for key in gradient_keys:
        error = (results[key] - expected[key]).norm()
        assert error < limit * expected[key].norm() + limit / 100 * total, f"{key}: {error}"


@pytest.mark.parametrize("mesh", [mesh for mesh, case in MESHES_AND_CASES if case == "float64"])
def test_weights_after_twenty_steps(mesh: str, results_folder: Path, one_process: dict) -> None:
    results, expected = load_file(results_folder / f"{mesh}-float64.safetensors"), one_process["float64"]
    names = [key.removeprefix("weight/") for key in expected if key.startswith("weight/")]
    # In exact arithmetic, the gradient of these is zero: position biases of windows of one cell, and biases that a norm
    # removes. Adam makes whole steps of its rounding.
    without_gradient = [name for name in names if expected[f"gradient/{name}"].norm() < 1e-12]
    assert all("position_bias" in name or "refine" in name for name in without_gradient)
    assert len(without_gradient) < len(names) / 3
    for name in set(names) - set(without_gradient):
        weight, expected_weight = results[f"weight/{name}"], expected[f"weight/{name}"]
        error = (weight - expected_weight).abs().max() / expected_weight.abs().max()
        assert error < 1e-9, f"{name}: {error}"
