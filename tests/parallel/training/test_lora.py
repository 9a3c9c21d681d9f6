"""Adapters train alike on any mesh, sharded with their frozen base, split with it or whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from credit.parallel.mesh import DeviceGrid
from tests.parallel.torchrun import launch
from tests.parallel.training import lora_worker
from tests.parallel.training.test_equality import relative

pytestmark = pytest.mark.slow


def test_many_ranks_equal_one_process(tmp_path: Path) -> None:
    launch("tests.parallel.training.lora_worker", 4, str(tmp_path))
    for number, case in enumerate(lora_worker.CASES):
        one = lora_worker.train(case, DeviceGrid(), "none")
        gradients = [key for key in one if key.startswith("gradient/")]
        assert {key.rpartition(".")[2] for key in gradients} == {"a", "b"}
        total = torch.stack([one[key].norm() for key in gradients]).norm()
        for mesh in lora_worker.MESHES:
            many, where = load_file(tmp_path / f"{mesh}-{number}.safetensors"), f"{mesh}, {case.name}"
            assert {key: t.shape for key, t in many.items()} == {key: t.shape for key, t in one.items()}
            for key in ("loss", "norm"):
                assert relative(many[key], one[key]) < 1e-5, f"{where}: {key}"
            for key in gradients:
                off = (many[key] - one[key]).norm()
                assert off < 1e-5 * one[key].norm() + 1e-7 * total, f"{where}: {key} is off by {off}"
