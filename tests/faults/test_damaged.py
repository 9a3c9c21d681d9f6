"""Runs with damaged checkpoints: they continue from the last intact one, or stop if there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.ranks import run_to_end
from tests.smoke.conftest import world
from tests.smoke.test_train import rows

pytestmark = pytest.mark.slow

OPTIONS = ("trainer.max_steps=4", "trainer.validate_every=4", "trainer.checkpoint_every=2", "trainer.log_every=1",
           "trainer.keep_last=9", "trainer.train_batch_size=2")  # fmt: skip


def train(folder: Path, *overrides: str, ranks: int = 1) -> tuple[int, str]:
    # The timeout is far below that of collectives, so a rank that waits for a stopped one fails the test.
    return run_to_end(["train", str(folder / "config.yml"), *OPTIONS, *overrides], ranks, timeout=180)


def damage_weights(checkpoint: Path) -> None:
    """Flip one bit in the middle of a file of weights."""
    path = next(iter(sorted((checkpoint / "model").iterdir())))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_without_intact_checkpoint_stops(tmp_path: Path, ranks: int) -> None:
    """The folder stays unchanged. With trainer.resume: never, a new run starts, and damaged checkpoints are renamed."""
    folder = world(tmp_path)
    run = folder / "run"
    exit_status, output = train(folder, "trainer.max_steps=2", "trainer.validate_every=2", ranks=ranks)
    assert exit_status == 0, output
    checkpoints = sorted((run / "checkpoints").glob("step_*"))
    assert [path.name for path in checkpoints] == ["step_00000000", "step_00000002"]
    for path in checkpoints:
        damage_weights(path)
    rows_before = rows(run)
    exit_status, output = train(folder, ranks=ranks)
    assert exit_status == 2, output
    assert f"{run / 'checkpoints'}: every checkpoint is damaged, 2 in total" in output
    assert "step_00000002: " in output and "does not match its checksum" in output
    assert "trainer.resume: never" in output
    status = json.loads((run / "STATUS").read_text())
    assert (status["status"], status["step"]) == ("failed", 2)
    assert "every checkpoint is damaged, 2 in total" in status["reason"]
    assert rows(run) == rows_before
    assert not (run / "heartbeat.json").exists()

    check_arguments = ["check", str(folder / "config.yml"), *OPTIONS, "trainer.resume=never"]
    exit_status, output = run_to_end(check_arguments, 1, timeout=180)
    assert exit_status == 0 and "it is renamed, and training starts from step 0" in output, output
    exit_status, output = train(folder, "trainer.resume=never", ranks=ranks)
    assert exit_status == 0, output
    assert [row[0] for row in rows(run)] == [1, 2, 3, 4]
    assert sorted(path.name for path in (run / "checkpoints").glob("*step_*")) == [
        "damaged_step_00000000", "damaged_step_00000002", "step_00000000", "step_00000002", "step_00000004",
    ]  # fmt: skip
    assert json.loads((run / "STATUS").read_text())["status"] == "done"


def test_a_damaged_newest_checkpoint_falls_back_to_the_last_good_one(tmp_path: Path) -> None:
    folder = world(tmp_path)
    assert train(folder, "trainer.max_steps=2", "trainer.validate_every=2")[0] == 0
    damage_weights(folder / "run" / "checkpoints" / "step_00000002")
    exit_status, output = train(folder)
    assert exit_status == 0, output
    assert "step_00000002 is skipped: model" in output
    assert [row[0] for row in rows(folder / "run")] == [1, 2, 3, 4]
    # With intact checkpoints, trainer.resume: never is refused.
    exit_status, output = train(folder, "trainer.resume=never")
    assert exit_status == 2 and "trainer.resume: never, but" in output, output


def test_run_from_other_weights_does_not_restart_over_damaged_checkpoints(tmp_path: Path) -> None:
    folder = world(tmp_path)
    assert train(folder, "trainer.max_steps=2", "trainer.validate_every=2")[0] == 0
    branch = f"save_loc={folder / 'branch'}", f"trainer.resume={folder / 'run' / 'checkpoints' / 'step_00000002'}"
    assert train(folder, *branch, "trainer.max_steps=4")[0] == 0
    for path in (folder / "branch" / "checkpoints").glob("step_*"):
        damage_weights(path)
    exit_status, output = train(folder, *branch)
    assert exit_status == 2 and f"{folder / 'branch' / 'checkpoints'}: every checkpoint is damaged" in output, output
