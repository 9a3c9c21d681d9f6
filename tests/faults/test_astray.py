"""Runs with wrong losses: skipped steps, a rollback that leaves out their batches, and a failure with its reason."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path

import pytest

from credit.train.monitor.run_lock import RunLock
from tests.faults.ranks import run_to_end
from tests.smoke.conftest import world
from tests.smoke.test_train import rows

pytestmark = pytest.mark.slow

STEADY = ("trainer.schedule.kind=constant", "trainer.schedule.warmup=0", "trainer.log_every=4", "trainer.max_steps=12",
          "trainer.validate_every=12", "trainer.checkpoint_every=4", "plugins=[tests.faults.inject]",
          "trainer.keep_last=20", "trainer.max_bad_steps=3", "model.attn_dropout=0")  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a small data set, its config and an undisturbed run in `clean`."""
    folder = world(tmp_path_factory.mktemp("astray"))
    train(folder, "clean", {})
    return folder


def train(folder: Path, name: str, fault: dict, *overrides: str, ranks: int = 1) -> tuple[int, str]:
    arguments = ["train", str(folder / "config.yml"), f"save_loc={folder / name}", *STEADY, *overrides]
    return run_to_end(arguments, ranks, CREDIT_TEST_INJECT=json.dumps(fault))


def read_progression(folder: Path, name: str, step: int = 12) -> dict:
    return json.loads((folder / name / "checkpoints" / f"step_{step:08d}" / "meta.json").read_text())["progression"]


def test_single_bad_steps_are_skipped_and_counted(runs: Path) -> None:
    exit_status, output = train(runs, "skipped", {"steps": [2, 6]})
    assert exit_status == 0, output
    faulty_rows, clean_rows = rows(runs / "skipped"), rows(runs / "clean")
    assert [row[0] for row in faulty_rows] == list(range(1, 13))
    assert [step for step, _, loss, *_ in faulty_rows if loss is None] == [3, 7]
    assert faulty_rows[:2] == clean_rows[:2]
    assert output.count("loss or gradient is not finite; the step was skipped") == 2
    assert read_progression(runs, "skipped")["left_out"] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_three_bad_steps_in_a_row_cause_rollback(runs: Path, ranks: int) -> None:
    """Batches 5, 6 and 7 are wrong on one rank. The run returns to step 4, and after batch 4 continues with batch 8."""
    name = f"back{ranks}"
    batch = f"trainer.train_batch_size={4 // ranks}"
    exit_status, output = train(runs, name, {"steps": [5, 6, 7], "rank": ranks - 1}, batch, ranks=ranks)
    assert exit_status == 0, output
    assert "The run continues from step 4 and skips the samples of 2000-" in output
    faulty_rows, clean_rows = rows(runs / name), rows(runs / "clean")
    assert [row[0] for row in faulty_rows] == list(range(1, 13)) and all(math.isfinite(row[2]) for row in faulty_rows)
    for (step, _, loss, *_), (_, _, expected_loss, *_) in zip(faulty_rows[:5], clean_rows[:5], strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5), step
    assert faulty_rows[5][2] != pytest.approx(clean_rows[5][2], rel=1e-3), "another batch"
    assert read_progression(runs, name) | {"losses": None} == read_progression(runs, name) | {
        "left_out": [5, 6, 7], "rollbacks": 1, "streak": [], "losses": None
    }  # fmt: skip
    # The batches stay left out if the run continues from a checkpoint.
    exit_status, output = train(runs, name, {}, batch, "trainer.max_steps=14", "trainer.validate_every=14", ranks=ranks)
    assert exit_status == 0 and [row[0] for row in rows(runs / name)] == list(range(1, 15)), output
    assert read_progression(runs, name, 14)["left_out"] == [5, 6, 7]


@pytest.mark.parametrize("ranks", [1, 2])
def test_second_rollback_is_a_failure(runs: Path, ranks: int) -> None:
    name = f"stopped{ranks}"
    fault = {"steps": [5, 6, 7, 8], "always": True, "rank": 0}
    exit_status, output = train(runs, name, fault, f"trainer.train_batch_size={4 // ranks}", ranks=ranks)
    assert exit_status == 1, output
    for words in ("step 8: loss or gradient was not finite 3 times in a row", "has already rolled back once",
                  "Initial times of the batches: 2000-01-", "Not finite at first: the loss"):  # fmt: skip
        assert words in output, output
    status = json.loads((runs / name / "STATUS").read_text())
    assert (status["status"], status["step"]) == ("failed", 4) and "not finite" in status["reason"]
    log = (runs / name / "logs" / f"rank_{ranks - 1:05d}.log").read_text()
    assert "The run continues from step 4" in log and "CreditError" in log
    assert not (runs / name / "heartbeat.json").exists()


def test_data_error_of_one_rank_fails_the_run(runs: Path) -> None:
    """The first rank only loses its peer. The second rank reports the error, which STATUS must contain."""
    fault = {"steps": [5], "rank": 1, "error": True}
    exit_status, output = train(runs, "unread", fault, "trainer.train_batch_size=2", ranks=2)
    assert exit_status == 2 and "era5.nc: t2m cannot be read" in output, output
    status = json.loads((runs / "unread" / "STATUS").read_text())
    assert (status["status"], status["reason"]) == ("failed", "era5.nc: t2m cannot be read")


def test_loss_spike_causes_rollback(runs: Path) -> None:
    spike = "trainer.loss_spike={factor: 20, window: 5}"
    exit_status, output = train(runs, "spike", {"steps": [6], "factor": 1000}, spike)
    assert exit_status == 0, output
    assert "step 7: the loss jumped to" in output and "The run continues from step 4" in output
    faulty_rows, clean_rows = rows(runs / "spike"), rows(runs / "clean")
    assert faulty_rows[:6] == clean_rows[:6]
    assert max(row[2] for row in faulty_rows) < 20 * clean_rows[0][2]
    progression = read_progression(runs, "spike")
    assert (progression["left_out"], progression["spikes"], progression["rollbacks"]) == ([6], 1, 0) and len(
        progression["losses"]
    ) == 5


def test_folder_of_running_job_is_refused(runs: Path) -> None:
    (runs / "held").mkdir()
    with RunLock(runs / "held", "42"):
        exit_status, output = train(runs, "held", {})
        assert exit_status == 2 and f"in use by job 42, process {os.getpid()} on {socket.gethostname()}" in output, (
            output
        )
        assert not (runs / "held" / "checkpoints").exists()


def test_repeated_error_fails_the_run(runs: Path) -> None:
    """torch raises RuntimeError for lost peers and for wrong shapes, so only a repeated error is permanent."""
    name, batch = "repeated", "trainer.train_batch_size=2"
    # The error is on the second rank only, so the first rank only loses its peer.
    shape = {"steps": [5], "rank": 1, "shape": True}
    for expected in ("requeue", "failed"):
        exit_status, output = train(runs, name, shape, batch, ranks=2)
        assert exit_status == 1, output
        status = json.loads((runs / name / "STATUS").read_text())
        assert (status["status"], status["step"]) == (expected, 4) and "must match the size" in status["reason"], output
