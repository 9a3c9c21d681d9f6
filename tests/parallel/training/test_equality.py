"""The same numbers on any mesh: outputs, losses, norms and gradients against one process, spectral norm and all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from credit.parallel.mesh import DeviceGrid
from tests.parallel.torchrun import launch
from tests.parallel.training import cases

# one for all v, one for all u
POWER_ITERATION_SUMS = 2
LIMIT_SECONDS = 60 * sum(map(len, cases.WHICH.values()))

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
    return {number: cases.train(case, DeviceGrid()) for number, case in enumerate(cases.CASES)}


@pytest.mark.parametrize("mesh", list(cases.MESHES))
def test_many_ranks_equal_one_process(mesh: str, four_ranks: Path, one_process: dict) -> None:
    for number in cases.WHICH[mesh]:
        case = cases.CASES[number]
        many, one = load_file(four_ranks / f"{mesh}-{number}.safetensors"), one_process[number]
        assert many.keys() == one.keys()
        where = f"{mesh}, {case.name}"
        for key in ("output", "loss", "norm"):
            assert relative(many[key], one[key]) < 1e-5, f"{where}: {key}"
        # five steps of Adam lie behind this one, which turns rounding of tiny gradients into whole steps
        assert relative(many["output of the average"], one["output of the average"]) < 1e-3, where
        gradients = [key for key in one if key.startswith("gradient/")]
        total = torch.stack([one[key].norm() for key in gradients]).norm()
        for key in gradients:
            off = (many[key] - one[key]).norm()
            assert off < 1e-5 * one[key].norm() + 1e-7 * total, f"{where}: {key} is off by {off}"


@pytest.mark.parametrize(("number", "forwards"), [(0, 1), (1, 4)])
def test_fsdp2_gathers_and_reduces_no_more_than_it_must(four_ranks: Path, number: int, forwards: int) -> None:
    """Forward and backward gather each unit once, but for the model and the last block, which stay in between.

    Gradients are reduced once an optimizer step, whatever micro-steps and rollout; the norm is one collective, and the
    power iterations of all weights are two.
    """
    counted = facts(four_ranks)["4x1"][number]
    units = counted["units"]
    assert units > 5 and counted["calls"].keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert counted["calls"]["all-gather"] == forwards * (2 * units - 2)
    assert counted["calls"]["reduce-scatter"] == units
    assert counted["calls"]["all-reduce"] == 1 + POWER_ITERATION_SUMS
    assert counted["bytes"]["reduce-scatter"] < 1.1 * counted["parameter_bytes"] / 4
    assert counted["bytes"]["all-gather"] < 2.1 * forwards * counted["parameter_bytes"]


@pytest.mark.parametrize(("number", "forwards"), [(0, 1), (1, 4)])
def test_tensor_parallel_layers_talk_as_often_as_their_plan_asks(four_ranks: Path, number: int, forwards: int) -> None:
    """A layer adds up four results forward; four inputs' gradients and two biases' backward.

    Spectral norm adds up for eight matrices at once: sigma forward and backward. The step's power iterations add up
    twice for the whole model.
    """
    counted = facts(four_ranks)["2x2"][number]
    assert counted["calls"]["all-reduce"] == 1 + POWER_ITERATION_SUMS + counted["layers"] * forwards * (4 + 4 + 2 + 2)
    assert counted["calls"]["all-gather"] == forwards * (2 * counted["units"] - 2)


def facts(folder: Path) -> dict:
    """Return the collectives that the ranks counted."""
    return json.loads((folder / "facts.json").read_text())


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference in units of the reference's largest value."""
    return ((value - reference).abs().max() / reference.abs().max()).item()
