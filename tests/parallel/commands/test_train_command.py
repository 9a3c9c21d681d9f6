"""Tests that `credit train` on several ranks equals a run on one process, on any mesh and after the loss of a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.parallel.forked import launch
from tests.parallel.torchrun import REPOSITORY
from tests.smoke.test_train import rows, wait_for_row

pytestmark = pytest.mark.slow

# With a constant learning rate, a longer run is the continuation of a shorter one.
STEADY = ("model.attn_dropout=0", "trainer.schedule.kind=constant", "trainer.schedule.warmup=0", "trainer.log_every=1",
          "data.forecast_len=2", "trainer.validate_every=4", "trainer.checkpoint_every=4")  # fmt: skip


def train_on_ranks(folder: Path, ranks: int, *overrides: str) -> str:
    """Run `credit train` on several ranks and return its output."""
    return launch("credit.cli.main", ranks, "train", str(folder / "config.yml"), *STEADY, *overrides)


def test_start_gathers_no_fields_and_reads_files_on_rank0_only(small_run: Path) -> None:
    train_on_ranks(
        small_run,
        2,
        "trainer.max_steps=1",
        "plugins=[tests.parallel.commands.forbid_large_gathers]",
        f"save_loc={small_run}/run",
    )
    assert len(rows(small_run / "run")) == 1


def test_rank0_inspects_the_store_and_each_rank_fills_its_own_cache(small_run: Path, command: Callable) -> None:
    store = f"data.store={small_run}/store.zarr"
    process = command("preprocess", small_run / "config.yml", store)
    assert process.returncode == 0, process.stderr
    cache_options = ("data.cache=disk", f"data.cache_folder={small_run}/near_$RANK")
    plugin = "plugins=[tests.parallel.commands.forbid_large_gathers]"
    train_on_ranks(small_run, 2, store, *cache_options, "trainer.max_steps=1", plugin, f"save_loc={small_run}/run")
    assert len(rows(small_run / "run")) == 1
    copies = [
        {path.name for path in (small_run / f"near_{rank}").glob("credit_store.zarr_*/[0-9]*")} for rank in (0, 1)
    ]
    assert all(copies) and copies[0] != copies[1]


def test_run_continues_on_other_meshes(small_run: Path) -> None:
    """Each part of the run continues from a checkpoint of another mesh, and the losses are those of one process."""
    train_on_ranks(small_run, 1, "trainer.max_steps=16", f"save_loc={small_run}/one", "trainer.train_batch_size=8")
    run_parts = [
        (4, 4, ("trainer.train_batch_size=2", "trainer.parallelism.replicate=2")),
        (4, 8, ("trainer.train_batch_size=4", "trainer.parallelism.tensor=2")),
        (1, 12, ("trainer.train_batch_size=8",)),
        # The command chooses the accumulation that keeps the size of the global batch.
        (2, 16, ("trainer.train_batch_size=2", "trainer.parallelism.data=ddp")),
    ]
    for ranks, steps, overrides in run_parts:
        output = train_on_ranks(
            small_run, ranks, f"trainer.max_steps={steps}", f"save_loc={small_run}/many", *overrides
        )
    assert "grad_accum_every is 2 instead of 1" in output
    rows_of_one, rows_of_many = rows(small_run / "one"), rows(small_run / "many")
    assert [row[:2] for row in rows_of_many] == [row[:2] for row in rows_of_one]
    for (step, _, loss, norm, _), (_, _, many_loss, many_norm, _) in zip(rows_of_one, rows_of_many, strict=True):
        # The first five steps agree to 1e-5. Then rounding errors grow.
        assert many_loss == pytest.approx(loss, rel=1e-5 if step <= 5 else 1e-3), step
        assert many_norm == pytest.approx(norm, rel=1e-4 if step <= 5 else 1e-2), step
    logs = [(small_run / run / "metrics.jsonl").read_text().splitlines() for run in ("one", "many")]
    scores = [[json.loads(line)["valid"] for line in log if '"valid"' in line] for log in logs]
    assert len(scores[0]) == len(scores[1]) == 4
    for scores_of_one, scores_of_many in zip(*scores, strict=True):
        assert scores_of_many == pytest.approx(scores_of_one, rel=1e-3)


def test_killed_rank_restarts_all_ranks(small_run: Path) -> None:
    """With ``torchrun --max-restarts``, the run resumes by itself and ends with the same losses."""
    overrides = ("trainer.max_steps=10", "trainer.train_batch_size=4", "trainer.parallelism.tensor=2")
    train_on_ranks(small_run, 2, *overrides, f"save_loc={small_run}/whole")
    with start_two_ranks(small_run, *overrides, f"save_loc={small_run}/killed", restarts=1) as process:
        wait_for_row(small_run / "killed", 6, process)
        os.kill(find_rank_pid(f"save_loc={small_run}/killed", 1), signal.SIGKILL)
    assert rows(small_run / "killed") == rows(small_run / "whole")


def test_stop_file_ends_all_ranks(small_run: Path) -> None:
    """The file STOP ends all ranks at the same step, with a checkpoint and with exit code 0."""
    overrides = ("trainer.max_steps=400", "trainer.validate_every=400")
    with start_two_ranks(small_run, *overrides) as process:
        wait_for_row(small_run / "run", 5, process)
        (small_run / "run" / "STOP").touch()
    status = json.loads((small_run / "run" / "STATUS").read_text())
    assert (status["status"], status["reason"]) == ("requeue", "file STOP")
    assert (small_run / "run" / "checkpoints" / f"step_{status['step']:08d}" / "manifest.json").is_file()


@contextmanager
def start_two_ranks(folder: Path, *overrides: str, restarts: int = 0) -> Iterator[subprocess.Popen]:
    """Start the run on two ranks with torchrun. On exit, wait at most 240 s for it to end with exit code 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               f"--max-restarts={restarts}", "-m", "credit.cli.main", "train", str(folder / "config.yml"), *STEADY,
               *overrides]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            yield process
            output = process.communicate(timeout=240)[0]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, output


def find_rank_pid(argument: str, rank: int) -> int:
    """Return the process ID of a rank of the run that has an argument that no other run has."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (path / "cmdline").read_text().split("\0")
                variables = (path / "environ").read_text().split("\0")
            except OSError:
                continue
            if argument in arguments and f"RANK={rank}" in variables:
                return int(path.name)
    raise AssertionError(f"rank {rank} is not running")
