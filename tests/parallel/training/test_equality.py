"""The same numbers on any mesh: outputs, losses, norms and gradients against one process, spectral norm and all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from credit.parallel.mesh import DeviceGrid
from tests.parallel.forked import launch
from tests.parallel.training import cases

# one for all v, one for all u
POWER_ITERATION_SUMS = 2
LIMIT_SECONDS = 60 * sum(map(len, cases.CASE_NUMBERS.values()))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_SECONDS)]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what four ranks have computed."""
    folder = tmp_path_factory.mktemp("equality")
    launch("tests.parallel.training.equality_worker", 4, str(folder), timeout=LIMIT_SECONDS)
    return folder


@pytest.fixture(scope="module")
def one_process() -> dict[int, dict[str, torch.Tensor]]:
    """Results of one process, by case."""
    numbers = set().union(*cases.CASE_NUMBERS.values())
    return {number: cases.train(cases.CASES[number], DeviceGrid()) for number in numbers}


@pytest.mark.parametrize("mesh", list(cases.MESHES))
def test_many_ranks_equal_one_process(mesh: str, four_ranks: Path, one_process: dict) -> None:
    for number in cases.CASE_NUMBERS[mesh]:
        case = cases.CASES[number]
        results, expected = load_file(four_ranks / f"{mesh}-{number}.safetensors"), one_process[number]
        assert results.keys() == expected.keys()
        label = f"{mesh}, {case.name}"
        for key in ("output", "loss", "norm"):
            assert relative(results[key], expected[key]) < 1e-5, f"{label}: {key}"
        # steps of Adam lie behind this one, which turn rounding of tiny gradients into whole steps
        assert relative(results["output of the average"], expected["output of the average"]) < 1e-3, label
        gradients = [key for key in expected if key.startswith("gradient/")]
        total = torch.stack([expected[key].norm() for key in gradients]).norm()
        for key in gradients:
            off = (results[key] - expected[key]).norm()
            assert off < 1e-5 * expected[key].norm() + 1e-7 * total, f"{label}: {key} is off by {off}"


@pytest.mark.parametrize(("number", "forwards"), [(0, 1), (1, 4)])
def test_fsdp2_gathers_and_reduces_no_more_than_it_must(four_ranks: Path, number: int, forwards: int) -> None:
    """Forward and backward gather each unit once, but for the model and the last block, which stay in between.

    Gradients are reduced once an optimizer step, whatever micro-steps and rollout; the norm is one collective, and the
    power iterations of all weights are two.
    """
    collectives = facts(four_ranks)["4x1"][number]
    units = collectives["units"]
    assert units > 5 and collectives["calls"].keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert collectives["calls"]["all-gather"] == forwards * (2 * units - 2)
    assert collectives["calls"]["reduce-scatter"] == units
    assert collectives["calls"]["all-reduce"] == 1 + POWER_ITERATION_SUMS
    assert collectives["bytes"]["reduce-scatter"] < 1.1 * collectives["parameter_bytes"] / 4
    assert collectives["bytes"]["all-gather"] < 2.1 * forwards * collectives["parameter_bytes"]


@pytest.mark.parametrize(("number", "forwards"), [(0, 1), (1, 4)])
def test_tensor_parallel_layers_talk_as_often_as_their_plan_asks(four_ranks: Path, number: int, forwards: int) -> None:
    """A layer adds up four results forward; four inputs' gradients and two biases' backward.

    Spectral norm adds up for eight matrices at once: sigma forward and backward. The step's power iterations add up
    twice for the whole model.
    """
    collectives = facts(four_ranks)["2x2"][number]
    assert collectives["calls"]["all-reduce"] == 1 + POWER_ITERATION_SUMS + collectives["layers"] * forwards * (
        4 + 4 + 2 + 2
    )
    assert collectives["calls"]["all-gather"] == forwards * (2 * collectives["units"] - 2)


def facts(folder: Path) -> dict:
    """Return the collectives that the ranks counted."""
    return json.loads((folder / "facts.json").read_text())


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference in units of the reference's largest value."""
    return ((value - reference).abs().max() / reference.abs().max()).item()
