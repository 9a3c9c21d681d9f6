"""Checkpoints of any mesh load on any other and on one process, bit for bit; all ranks raise the same errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from tests.parallel.training.checkpoint_worker import MODELS, RANKS, build_unsharded, expected_of, values

LIMIT_SECONDS = 240


@pytest.mark.slow
def test_every_mesh_reads_every_other(tmp_path: Path, repository: Path) -> None:
    expected = expected_of(values(build_unsharded()))
    with AsyncCheckpointer(tmp_path / "single") as store:
        store.save(1, {"all": expected}, {"mask": torch.ones(2)}, {})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    # a session of its own, so that ranks that hang can be ended with their launcher
    process = subprocess.Popen(
        [*command, "-m", "tests.parallel.training.checkpoint_worker", str(tmp_path)],
        cwd=repository,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=LIMIT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    for kind in MODELS:
        path = checkpoint.resolve_checkpoint(tmp_path / kind, "latest", "key")
        assert checkpoint.load_meta(path)["format"] == 2
        tensors = checkpoint.load_tensors(path, "all")
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        assert all(tensors[name].dtype == value.dtype for name, value in expected.items())
