"""Tests that checkpoints of any mesh load bit for bit on any other mesh, and that all ranks raise the same errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from tests.parallel.forked import launch, run_ranks
from tests.parallel.training.checkpoint_worker import MODELS, RANKS, build_expected_state, build_unsharded, draw_values


@pytest.mark.slow
def test_every_mesh_loads_checkpoints_of_every_other_mesh(tmp_path: Path) -> None:
    expected = build_expected_state(draw_values(build_unsharded()))
    with AsyncCheckpointer(tmp_path / "single") as checkpointer:
        checkpointer.save(1, {"all": expected}, {"mask": torch.ones(2)}, {})
    launch("tests.parallel.training.checkpoint_worker", RANKS, str(tmp_path), timeout=240)
    for kind in MODELS:
        path = checkpoint.resolve_checkpoint(tmp_path / kind, "latest", "key")
        assert checkpoint.load_meta(path)["format"] == 2
        tensors = checkpoint.load_tensors(path, "all")
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        assert all(tensors[name].dtype == value.dtype for name, value in expected.items())


def test_older_checkpoint_loads_after_rank_is_killed_while_it_writes(tmp_path: Path) -> None:
    exit_code, _ = run_ranks("tests.parallel.training.checkpoint_kill_worker", 2, str(tmp_path), "killed", timeout=120)
    assert exit_code != 0
    # Both ranks write into one file. It is half written, in a folder that is not the final one.
    assert not (tmp_path / "step_00000002").exists()
    assert checkpoint.find_newest_checkpoint(tmp_path) == tmp_path / "step_00000001"
    names = sorted(file.name for file in (tmp_path / "step_00000001" / "model").iterdir())
    assert names == ["index.json", "rank_00000.safetensors"]
    assert torch.equal(checkpoint.load_tensors(tmp_path / "latest", "model")["weight"], torch.arange(2000.0))
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(2, {"model": {"weight": torch.zeros(3)}}, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000002"]
    assert checkpoint.verify_checkpoint(tmp_path / "step_00000002") is None


def test_run_ends_if_checkpoint_writers_lose_their_connection(tmp_path: Path) -> None:
    """gloo closes the connections after a timeout, so no later checkpoint could be saved."""
    launch("tests.parallel.training.checkpoint_kill_worker", 2, str(tmp_path), "late", timeout=120)
    assert checkpoint.find_newest_checkpoint(tmp_path) == tmp_path / "step_00000001"
