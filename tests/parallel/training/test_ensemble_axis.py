"""Tests that ranks that share the members of an ensemble train as one process does, on every mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from credit.parallel.mesh import DeviceGrid
from tests.parallel.forked import launch
from tests.parallel.training import cases, ensemble_worker
from tests.parallel.training.comparison import require_equal_training, require_equal_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

MESH_NAMES = [*cases.ENSEMBLE_MESHES[2], *cases.ENSEMBLE_MESHES[4]]
MESHES_AND_CASES = [(mesh, number) for mesh, numbers in cases.ENSEMBLE_CASE_NUMBERS.items() for number in numbers]


@pytest.fixture(scope="module")
def results_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of two ranks and of four ranks."""
    folder = tmp_path_factory.mktemp("ensemble")
    for num_ranks in cases.ENSEMBLE_MESHES:
        launch("tests.parallel.training.ensemble_worker", num_ranks, str(folder), timeout=1200)
    return folder


@pytest.fixture(scope="module")
def expected_results() -> dict[int, dict[str, torch.Tensor]]:
    """Number of a case -> results of one process."""
    return {number: cases.train(cases.CASES[number], DeviceGrid()) for number in cases.ENSEMBLE_CASES}


@pytest.mark.parametrize(("mesh", "number"), MESHES_AND_CASES)
def test_shared_members_equal_one_process(mesh: str, number: int, results_folder: Path, expected_results: dict) -> None:
    results = load_file(results_folder / f"{mesh}-{number}.safetensors")
    require_equal_training(results, expected_results[number], cases.CASES[number].double)


@pytest.mark.parametrize(("mesh", "number"), [key for key in MESHES_AND_CASES if cases.CASES[key[1]].double])
def test_weights_after_twenty_steps_equal_one_process(
    mesh: str, number: int, results_folder: Path, expected_results: dict
) -> None:
    results = load_file(results_folder / f"{mesh}-{number}.safetensors")
    require_equal_weights(results, expected_results[number])


@pytest.mark.parametrize("mesh", MESH_NAMES)
def test_loss_exchanges_members_and_gradients_once(mesh: str, results_folder: Path) -> None:
    """Each loss sends the members of this rank once, and the gradients of its part of the loss once."""
    case = cases.CASES[cases.COUNTED_CASE]
    num_ranks = 2 if mesh in cases.ENSEMBLE_MESHES[2] else 4
    mesh_config = (cases.ENSEMBLE_MESHES[2] | cases.ENSEMBLE_MESHES[4])[mesh]
    facts = json.loads((results_folder / f"facts-{num_ranks}.json").read_text())[mesh]
    num_exchanges = 2 * case.rollout * case.accumulation
    assert facts["calls"]["all-to-all"] == num_exchanges
    num_sample_ranks = num_ranks // mesh_config["ensemble"] // mesh_config.get("tensor", 1)
    samples_per_micro_step = case.samples // case.accumulation // num_sample_ranks
    local_members = case.members // mesh_config["ensemble"]
    field_bytes = 4 * 3 * case.rows * cases.COLUMNS
    sent_bytes = num_exchanges * local_members * samples_per_micro_step * field_bytes
    # If the rows do not divide evenly, one of the two exchanges is a little larger.
    assert facts["bytes"]["all-to-all"] == pytest.approx(sent_bytes, rel=0.11)


@pytest.mark.parametrize("num_ranks", cases.ENSEMBLE_MESHES)
def test_memory_of_the_loss_is_bounded(num_ranks: int, results_folder: Path) -> None:
    """With M members on E ranks, the largest tensor has at most M/E + 1 fields, and all tensors 3 M/E + 2."""
    memory = json.loads((results_folder / f"facts-{num_ranks}.json").read_text())["loss memory"]
    local_members = ensemble_worker.MEMBERS_OF_MEMORY_TEST // num_ranks
    assert local_members <= memory["largest"] <= local_members + 1, memory
    # The loss itself and other scalars are a small fraction of a field.
    assert memory["total"] <= 3 * local_members + 2 + 0.01, memory
