"""Tests that training on divided fields gives the results of one process, on every mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.domain import training_cases
from tests.parallel.forked import launch
from tests.parallel.training.comparison import require_equal_training, require_equal_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MESHES_AND_CASES = [(mesh, case) for mesh, names in training_cases.CASES_OF_MESH.items() for case in names]


@pytest.fixture(scope="module")
def results_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of four ranks."""
    folder = tmp_path_factory.mktemp("domain")
    launch("tests.parallel.domain.training_worker", training_cases.NUM_RANKS, str(folder), timeout=900)
    return folder


@pytest.fixture(scope="module")
def expected_results() -> dict[str, dict[str, torch.Tensor]]:
    """Name of a case -> results of one process."""
    return {name: training_cases.train_alone(name) for name in training_cases.CASES}


def require_similar_training(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Require that losses and outputs in bfloat16 equal those of one process up to rounding errors of 8 bits."""
    for key, limit in (("loss", 5e-3), ("output", 2e-2)):
        error = (results[key] - expected[key]).abs().max() / expected[key].abs().max()
        assert error < limit, f"{key}: {error}"


@pytest.mark.parametrize(("mesh", "case"), MESHES_AND_CASES)
def test_training_equals_one_process(mesh: str, case: str, results_folder: Path, expected_results: dict) -> None:
    results = load_file(results_folder / f"{mesh}-{case}.safetensors")
    if training_cases.CASES[case].amp:
        require_similar_training(results, expected_results[case])
        return
    require_equal_training(results, expected_results[case], training_cases.CASES[case].double)


@pytest.mark.parametrize(("mesh", "case"), [pair for pair in MESHES_AND_CASES if training_cases.CASES[pair[1]].double])
def test_weights_after_the_last_step_equal_one_process(
    mesh: str, case: str, results_folder: Path, expected_results: dict
) -> None:
    results = load_file(results_folder / f"{mesh}-{case}.safetensors")
    require_equal_weights(results, expected_results[case])
