"""Tests of ``credit train`` on ranks that divide the fields of a sample: steps, blocks, refusals and a lost rank."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from credit.cli.main import main
from tests.parallel.forked import launch
from tests.parallel.torchrun import REPOSITORY
from tests.smoke.conftest import world

pytestmark = pytest.mark.slow

SETTINGS = (
    "trainer.max_steps=4", "trainer.log_every=1", "trainer.validate_every=2", "trainer.valid_samples=3",
    "trainer.checkpoint_every=2", "model.attn_dropout=0", "model.ff_dropout=0", "model.hyperdiffusion={time: 24h}",
    "trainer.schedule.kind=constant", "trainer.schedule.warmup=0",
)  # fmt: skip


def read_rows(run: Path) -> list[dict]:
    """Return the rows of the log of a run that have a loss or a validation."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row or row.get("valid")]


def test_steps_and_validation_are_those_of_one_process(tmp_path: Path) -> None:
    """Two ranks divide the fields for two steps; one process continues the run."""
    folders = []
    for name in ("alone", "divided"):
        (tmp_path / name).mkdir()
        folders.append(world(tmp_path / name))
    one_process, two_ranks = folders
    assert main(["train", str(one_process / "config.yml"), *SETTINGS]) == 0
    arguments = (str(two_ranks / "config.yml"), *SETTINGS)
    output = launch("credit.cli.main", 2, "train", *arguments, "trainer.parallelism.domain=2", "trainer.max_steps=2")
    assert "each field is divided among 2 ranks" in output
    assert main(["train", *arguments]) == 0
    rows, expected_rows = read_rows(two_ranks / "run"), read_rows(one_process / "run")
    assert len(rows) == len(expected_rows) == 6
    for row, expected in zip(rows, expected_rows, strict=True):
        for key in ("loss", "grad_norm"):
            if key in expected:
                assert row[key] == pytest.approx(expected[key], rel=1e-4), key
        for key, value in (expected.get("valid") or {}).items():
            assert row["valid"][key] == pytest.approx(value, rel=1e-3), key


def test_store_with_blocks_gives_the_same_steps(tmp_path: Path) -> None:
    """Two ranks that read blocks take the steps of two ranks that read whole fields. Only the latter are warned."""
    rows_by_name = {}
    for name, blocks in (("whole", 1), ("blocks", 2)):
        (tmp_path / name).mkdir()
        folder = world(tmp_path / name)
        arguments = (
            str(folder / "config.yml"), *SETTINGS, f"data.store={folder / 'store.zarr'}",
            f"preprocess.blocks={{lat: {blocks}, lon: 1}}",
        )  # fmt: skip
        assert main(["preprocess", *arguments]) == 0
        output = launch("credit.cli.main", 2, "train", *arguments, "trainer.parallelism.domain={lat: 2, lon: 1}")
        assert ("is not divided into blocks" in output) == (name == "whole")
        rows = read_rows(folder / "run")
        assert len(rows) == 6
        rows_by_name[name] = [{key: row.get(key) for key in ("step", "loss", "grad_norm", "valid")} for row in rows]
    assert rows_by_name["blocks"] == rows_by_name["whole"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.parallelism.domain={lat: 3, lon: 1}"], "does not divide the 2 ranks"),
        (["trainer.parallelism={domain: 2, data: ddp}"], "needs? data: fsdp2"),
        (["trainer.parallelism.domain=2", "model.ff_dropout=0.1"], "to 0, or use model.noise"),
        (["trainer.parallelism.domain=2", "trainer.preview={}"], "remove preview"),
    ],
)
def test_check_refuses_settings_that_do_not_allow_division(
    overrides: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = world(tmp_path)
    status = main(["check", str(folder / "config.yml"), "--world-size", "2", *SETTINGS, *overrides])
    captured = capsys.readouterr()
    assert status == 2
    assert re.search(message, captured.out + captured.err), captured


def test_rank_ends_after_another_rank_dies(tmp_path: Path) -> None:
    """No launcher would end the other rank here, so the lost connection must end it."""
    folder = world(tmp_path)
    overrides = ("trainer.parallelism.domain=2", "plugins=[tests.parallel.commands.die_on_rank1]")
    arguments = ["train", str(folder / "config.yml"), *SETTINGS, *overrides]
    processes = start_ranks(2, arguments)
    try:
        processes[1].communicate(timeout=300)
        assert processes[1].returncode == -signal.SIGKILL
        output, _ = processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
    assert processes[0].returncode not in (0, None), output
    assert re.search("Connection (closed|reset) by peer", output), output
    # Another start may succeed, so the job script continues the run.
    assert json.loads((folder / "run" / "STATUS").read_text())["status"] == "requeue"


def start_ranks(num_ranks: int, arguments: list[str]) -> list[subprocess.Popen]:
    """Start a command of `credit` on several ranks, as mpiexec or srun would, and return its processes."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    world_variables = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    for rank in range(num_ranks):
        environment = {
            **os.environ,
            **world_variables,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "PYTHONPATH": str(REPOSITORY),
        }
        command = [sys.executable, "-m", "credit.cli.main", *arguments]
        processes.append(
            subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    return processes
