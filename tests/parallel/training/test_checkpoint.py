"""Checkpoints of any mesh load on any other and on one process, bit for bit; all ranks raise the same errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from tests.parallel.forked import launch
from tests.parallel.training.checkpoint_worker import MODELS, RANKS, build_unsharded, expected_of, values


@pytest.mark.slow
def test_every_mesh_reads_every_other(tmp_path: Path) -> None:
    expected = expected_of(values(build_unsharded()))
    with AsyncCheckpointer(tmp_path / "single") as store:
        store.save(1, {"all": expected}, {"mask": torch.ones(2)}, {})
    launch("tests.parallel.training.checkpoint_worker", RANKS, str(tmp_path), timeout=240)
    for kind in MODELS:
        path = checkpoint.resolve_checkpoint(tmp_path / kind, "latest", "key")
        assert checkpoint.load_meta(path)["format"] == 2
        tensors = checkpoint.load_tensors(path, "all")
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        assert all(tensors[name].dtype == value.dtype for name, value in expected.items())
