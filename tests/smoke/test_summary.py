"""The summary at the end of a run, and what goes on being counted when a run goes on."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from credit.errors import CreditError, DataError
from credit.parallel import process_info
from credit.train import trainer
from tests.smoke.test_preview import log_of

SHORT = ("trainer.max_steps=20", "trainer.checkpoint_every=10", "trainer.schedule.kind=constant")


@pytest.mark.slow
def test_a_run_ends_with_a_summary_of_all_its_parts(small_run: Path, command) -> None:
    config, folder = small_run / "config.yml", small_run / "run"
    done = command("train", config, *SHORT)
    assert done.returncode == 0, done.stderr
    first = json.loads((folder / "summary.json").read_text())
    assert "20 of 20, 80 samples" in done.stderr and "GFLOP/s per process" in done.stderr
    assert first["steps"] == 20 and first["best"]["step"] == 20 and first["device"] == "cpu"
    assert sum(first["time_shares"].values()) == pytest.approx(1 + first["time_shares"]["data_wait"])
    last = [row for row in log_of(folder) if "loss" in row][-1]
    assert 0 < last["process_hours"] == last["wall_hours"] <= first["wall_hours"]
    assert last["tflops"] > 0 and not {"mfu", "energy_kwh", "gpu_hours"} & last.keys()

    # a run that is done is left as it is
    assert command("train", config, *SHORT).returncode == 0
    assert json.loads((folder / "summary.json").read_text()) == first

    # the newest checkpoint is lost, with ten steps; their time was used all the same
    shutil.rmtree(folder / "checkpoints" / "step_00000020")
    done = command("train", config, *SHORT)
    assert done.returncode == 0, done.stderr
    second = json.loads((folder / "summary.json").read_text())
    again = [row for row in log_of(folder) if row["step"] == 15 and "loss" in row][0]
    assert again["wall_hours"] > last["wall_hours"], "rows go on from those that were cut"
    assert second["wall_hours"] > again["wall_hours"] and second["samples"] == 80
    meta = json.loads((folder / "checkpoints" / "step_00000020" / "meta.json").read_text())
    assert meta["progression"]["spent"]["wall_hours"] > last["wall_hours"]

    # another run that begins from its weights has used nothing yet
    assert command("train", config, *SHORT, f"save_loc={small_run}/next", f"trainer.resume={folder}/checkpoints/best",
                   "trainer.max_steps=25").returncode == 0  # fmt: skip
    third = json.loads((small_run / "next" / "summary.json").read_text())
    assert third["wall_hours"] < second["wall_hours"] and third["counted_since_step"] == 20


@pytest.mark.slow
def test_a_run_that_fails_has_a_summary(small_run: Path, command) -> None:
    config, folder = small_run / "config.yml", small_run / "run"
    # the gradient overflows: it goes back once, and fails the second time
    astray = ("trainer.learning_rate=1e30", "trainer.grad_max_norm=null", "trainer.max_bad_steps=2")
    failed = command("train", config, *SHORT, *astray)
    assert failed.returncode == 1 and "GFLOP/s per process" in failed.stderr, failed.stderr
    first = json.loads((folder / "summary.json").read_text())
    assert first["steps"] < 20 and first["wall_hours"] > 0
    # what was used for nothing was used
    assert command("train", config, *SHORT).returncode == 0
    second = json.loads((folder / "summary.json").read_text())
    assert second["steps"] == 20 and second["wall_hours"] > first["wall_hours"]
    assert min(row["wall_hours"] for row in log_of(folder) if "loss" in row) > first["wall_hours"]


@pytest.mark.parametrize("second_error", [ValueError("no meta device"), CreditError("no FLOPs")])
def test_what_a_summary_fails_of_does_not_hide_why_the_run_failed(
    small_run: Path, command, monkeypatch: pytest.MonkeyPatch, second_error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise DataError("the field is gone")

    def fail_too(*_: object) -> None:
        raise second_error

    monkeypatch.setattr(trainer.Trainer, "_take_steps", fail)
    monkeypatch.setattr(trainer, "write_partial_summary", fail_too)
    failed = command("train", small_run / "config.yml", *SHORT)
    assert failed.returncode == 2 and "the field is gone" in failed.stderr.splitlines()[-1], failed.stderr
    assert json.loads((small_run / "run" / "STATUS").read_text())["reason"] == "the field is gone"
    assert f"no summary of the run: {type(second_error).__name__}: {second_error}" in failed.stderr


@pytest.mark.slow
def test_the_start_counts(small_run: Path, command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand ranks need minutes to find each other."""

    @contextmanager
    def slow_group(*_: object) -> Iterator[None]:
        time.sleep(2.0)
        yield None

    monkeypatch.setattr(process_info, "process_group", slow_group)
    assert command("train", small_run / "config.yml", *SHORT, "trainer.max_steps=1").returncode == 0
    summary = json.loads((small_run / "run" / "summary.json").read_text())
    assert summary["time_shares"]["other"] * summary["wall_hours"] * 3600 > 2.0


@pytest.mark.slow
def test_a_run_that_stops_to_go_on_has_a_summary(small_run: Path, command) -> None:
    done = command("train", small_run / "config.yml", *SHORT, "trainer.walltime=1min")
    assert done.returncode == 85, done.stderr
    summary = json.loads((small_run / "run" / "summary.json").read_text())
    assert summary["steps"] == 1 and "1 of 20, 4 samples" in done.stderr
