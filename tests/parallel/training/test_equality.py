"""Tests that outputs, losses, norms and gradients of any mesh are those of one process, also with spectral norm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from credit.parallel.mesh import DeviceGrid
from tests.parallel.forked import launch
from tests.parallel.training import cases

# All-reduces of the power iterations: one for all vectors v, and one for all vectors u.
POWER_ITERATION_SUMS = 2
LIMIT_SECONDS = 60 * sum(map(len, cases.CASE_NUMBERS.values()))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_SECONDS)]


@pytest.fixture(scope="module")
def results_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of four ranks."""
    folder = tmp_path_factory.mktemp("equality")
    launch("tests.parallel.training.equality_worker", 4, str(folder), timeout=LIMIT_SECONDS)
    return folder


@pytest.fixture(scope="module")
def expected_results() -> dict[int, dict[str, torch.Tensor]]:
    """Number of a case -> results of one process."""
    numbers = set().union(*cases.CASE_NUMBERS.values())
    return {number: cases.train(cases.CASES[number], DeviceGrid()) for number in numbers}


@pytest.mark.parametrize("mesh", list(cases.MESHES))
def test_many_ranks_equal_one_process(mesh: str, results_folder: Path, expected_results: dict) -> None:
    for number in cases.CASE_NUMBERS[mesh]:
        case = cases.CASES[number]
        results, expected = load_file(results_folder / f"{mesh}-{number}.safetensors"), expected_results[number]
        assert results.keys() == expected.keys()
        label = f"{mesh}, {case.name}"
        for key in ("output", "loss", "norm"):
            assert relative_error(results[key], expected[key]) < 1e-5, f"{label}: {key}"
        # Earlier steps of Adam turn rounding errors of tiny gradients into steps of full size.
        assert relative_error(results["output of the average"], expected["output of the average"]) < 1e-3, label
        gradients = [key for key in expected if key.startswith("gradient/")]
        total = torch.stack([expected[key].norm() for key in gradients]).norm()
        for key in gradients:
            error = (results[key] - expected[key]).norm()
            assert error < 1e-5 * expected[key].norm() + 1e-7 * total, f"{label}: {key} is off by {error}"


@pytest.mark.parametrize(("number", "forwards"), [(0, 1), (1, 4)])
def test_fsdp2_uses_no_unnecessary_collectives(results_folder: Path, number: int, forwards: int) -> None:
    """The forward and the backward pass gather each unit once.

    The model itself and the last block stay gathered between the two passes. Gradients are reduced once for each
    optimizer step, for any number of micro-steps and rollout steps. The norm needs one collective, and the power
    iterations of all weights need two.
    """
    collectives = load_facts(results_folder)["4x1"][number]
    units = collectives["units"]
    assert units > 5 and collectives["calls"].keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert collectives["calls"]["all-gather"] == forwards * (2 * units - 2)
    assert collectives["calls"]["reduce-scatter"] == units
    assert collectives["calls"]["all-reduce"] == 1 + POWER_ITERATION_SUMS
    assert collectives["bytes"]["reduce-scatter"] < 1.1 * collectives["parameter_bytes"] / 4
    assert collectives["bytes"]["all-gather"] < 2.1 * forwards * collectives["parameter_bytes"]


@pytest.mark.parametrize(("number", "forwards"), [(0, 1), (1, 4)])
def test_tensor_parallel_layers_use_the_collectives_of_their_plan(
    results_folder: Path, number: int, forwards: int
) -> None:
    """A layer sums four results in the forward pass, and gradients of four inputs and two biases in the backward pass.

    Spectral norm sums sigma for eight matrices at once, once forward and once backward. The power iterations of a step
    need two sums for the whole model.
    """
    collectives = load_facts(results_folder)["2x2"][number]
    assert collectives["calls"]["all-reduce"] == 1 + POWER_ITERATION_SUMS + collectives["layers"] * forwards * (
        4 + 4 + 2 + 2
    )
    assert collectives["calls"]["all-gather"] == forwards * (2 * collectives["units"] - 2)


def load_facts(folder: Path) -> dict:
    """Return the collectives that the ranks counted."""
    return json.loads((folder / "facts.json").read_text())


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value of the reference."""
    return ((value - reference).abs().max() / reference.abs().max()).item()
