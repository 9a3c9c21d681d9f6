"""Members of an ensemble shared by ranks: the same numbers as on one process, on every mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from credit.parallel.mesh import DeviceGrid
from tests.parallel.forked import launch
from tests.parallel.training import cases, ensemble_worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

MESH_NAMES = [*cases.ENSEMBLE_MESHES[2], *cases.ENSEMBLE_MESHES[4]]
MESHES_AND_CASES = [(mesh, number) for mesh, numbers in cases.ENSEMBLE_CASE_NUMBERS.items() for number in numbers]


@pytest.fixture(scope="module")
def results_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two and four ranks have computed."""
    folder = tmp_path_factory.mktemp("ensemble")
    for num_ranks in cases.ENSEMBLE_MESHES:
        launch("tests.parallel.training.ensemble_worker", num_ranks, str(folder), timeout=1200)
    return folder


@pytest.fixture(scope="module")
def one_process() -> dict[int, dict[str, torch.Tensor]]:
    """Results of one process, by case."""
    return {number: cases.train(cases.CASES[number], DeviceGrid()) for number in cases.ENSEMBLE_CASES}


@pytest.mark.parametrize(("mesh", "number"), MESHES_AND_CASES)
def test_shared_members_equal_one_process(mesh: str, number: int, results_folder: Path, one_process: dict) -> None:
    case = cases.CASES[number]
    results, expected = load_file(results_folder / f"{mesh}-{number}.safetensors"), one_process[number]
    assert results.keys() == expected.keys()
    limit = 1e-9 if case.double else 1e-5
    for key in ("output", "loss"):
        error = (results[key] - expected[key]).abs().max() / expected[key].abs().max()
        assert error < limit, f"{key}: {error}"
    # The gradient of the CRPS jumps where members tie with the truth, so rounding grows from step to step, on meshes
    # without ensemble groups just as much. The logged norm is float32 in every case.
    norm_errors = (results["norm"] - expected["norm"]).abs() / expected["norm"]
    assert norm_errors[0] < 1e-5 and norm_errors.max() < 1e-3, norm_errors
    gradient_keys = [key for key in expected if key.startswith("gradient/")]
    total = torch.stack([expected[key].norm() for key in gradient_keys]).norm()
    for key in gradient_keys:
        error = (results[key] - expected[key]).norm()
        assert error < limit * expected[key].norm() + limit / 100 * total, f"{key}: {error}"


@pytest.mark.parametrize(("mesh", "number"), [key for key in MESHES_AND_CASES if cases.CASES[key[1]].double])
def test_weights_after_twenty_steps(mesh: str, number: int, results_folder: Path, one_process: dict) -> None:
    results, expected = load_file(results_folder / f"{mesh}-{number}.safetensors"), one_process[number]
    names = [key.removeprefix("weight/") for key in expected if key.startswith("weight/")]
    # In exact arithmetic, the gradient of these is zero: position biases of windows of one cell, and biases that a norm
    # removes. Adam makes whole steps of its rounding.
    without_gradient = [name for name in names if expected[f"gradient/{name}"].norm() < 1e-12]
    assert all("position_bias" in name or "refine" in name for name in without_gradient)
    assert len(without_gradient) < len(names) / 3
    for name in names:
        if name in without_gradient:
            continue
        weight, expected_weight = results[f"weight/{name}"], expected[f"weight/{name}"]
        error = (weight - expected_weight).abs().max() / expected_weight.abs().max()
        assert error < 1e-9, f"{name}: {error}"


@pytest.mark.parametrize("mesh", MESH_NAMES)
def test_bytes_of_exchanges(mesh: str, results_folder: Path) -> None:
    """A step sends this rank's members once, and the gradients of its part once."""
    case = cases.CASES[cases.COUNTED_CASE]
    num_ranks = 2 if mesh in cases.ENSEMBLE_MESHES[2] else 4
    conf = (cases.ENSEMBLE_MESHES[2] | cases.ENSEMBLE_MESHES[4])[mesh]
    facts = json.loads((results_folder / f"facts-{num_ranks}.json").read_text())[mesh]
    num_exchanges = 2 * case.rollout * case.accumulation
    assert facts["calls"]["all-to-all"] == num_exchanges
    num_sample_ranks = num_ranks // conf["ensemble"] // conf.get("tensor", 1)
    samples_per_micro_step = case.samples // case.accumulation // num_sample_ranks
    local_members = case.members // conf["ensemble"]
    field_bytes = 4 * 3 * case.rows * cases.COLUMNS
    sent_bytes = num_exchanges * local_members * samples_per_micro_step * field_bytes
    # rows that do not divide evenly make one of the two exchanges a little larger
    assert facts["bytes"]["all-to-all"] == pytest.approx(sent_bytes, rel=0.11)


@pytest.mark.parametrize("num_ranks", cases.ENSEMBLE_MESHES)
def test_memory_of_the_loss(num_ranks: int, results_folder: Path) -> None:
    """With M members on E ranks, no tensor has more than M/E + 1 fields, and all together 3 M/E + 2."""
    memory = json.loads((results_folder / f"facts-{num_ranks}.json").read_text())["loss memory"]
    local_members = ensemble_worker.MEMBERS_OF_MEMORY_TEST // num_ranks
    assert local_members <= memory["largest"] <= local_members + 1, memory
    # The loss itself and other scalars are a small fraction of a field.
    assert memory["total"] <= 3 * local_members + 2 + 0.01, memory
