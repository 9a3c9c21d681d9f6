"""The same numbers on any mesh: outputs, losses, norms and gradients against one process, spectral norm and all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from credit.parallel.mesh import RunMesh
from tests.parallel import cases
from tests.parallel.grid import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what four ranks have computed."""
    folder = tmp_path_factory.mktemp("equality")
    launch("tests.parallel.equality_worker", 4, str(folder))
    return folder


@pytest.fixture(scope="module")
def one_process() -> dict[int, dict[str, torch.Tensor]]:
    """What one process has computed, by case."""
    return {number: cases.train(case, RunMesh()) for number, case in enumerate(cases.CASES)}


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


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference in units of the reference's largest value."""
    return ((value - reference).abs().max() / reference.abs().max()).item()
