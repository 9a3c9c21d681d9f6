"""Tests that adapters train on any mesh as on one process.

Adapters are sharded or split together with their frozen base layers, or are not divided.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from credit.parallel.mesh import DeviceGrid
from tests.parallel.forked import launch
from tests.parallel.training import lora_worker
from tests.parallel.training.test_equality import relative_error

pytestmark = pytest.mark.slow


def test_many_ranks_equal_one_process(tmp_path: Path) -> None:
    launch("tests.parallel.training.lora_worker", 4, str(tmp_path))
    for number, case in enumerate(lora_worker.CASES):
        expected = lora_worker.train(case, DeviceGrid(), "none")
        gradients = [key for key in expected if key.startswith("gradient/")]
        assert {key.rpartition(".")[2] for key in gradients} == {"a", "b"}
        total = torch.stack([expected[key].norm() for key in gradients]).norm()
        for mesh in lora_worker.MESHES:
            results, label = load_file(tmp_path / f"{mesh}-{number}.safetensors"), f"{mesh}, {case.name}"
            assert {key: t.shape for key, t in results.items()} == {key: t.shape for key, t in expected.items()}
            for key in ("loss", "norm"):
                assert relative_error(results[key], expected[key]) < 1e-5, f"{label}: {key}"
            for key in gradients:
                error = (results[key] - expected[key]).norm()
                assert error < 1e-5 * expected[key].norm() + 1e-7 * total, f"{label}: {key} is off by {error}"
