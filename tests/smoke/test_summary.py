"""Summary at the end of a run, and the totals of time that a continued run carries on."""

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
from tests.smoke.test_preview import read_log

SHORT = ("trainer.max_steps=20", "trainer.checkpoint_every=10", "trainer.schedule.kind=constant")


@pytest.mark.slow
def test_summary_counts_time_of_lost_steps_but_not_of_base_run(small_run: Path, command) -> None:
    config, folder = small_run / "config.yml", small_run / "run"
    result = command("train", config, *SHORT)
    assert result.returncode == 0, result.stderr
    first_summary = json.loads((folder / "summary.json").read_text())
    assert "20 of 20, 80 samples" in result.stderr and "GFLOP/s per process" in result.stderr
    assert first_summary["steps"] == 20 and first_summary["best"]["step"] == 20 and first_summary["device"] == "cpu"
    assert sum(first_summary["time_shares"].values()) == pytest.approx(1 + first_summary["time_shares"]["data_wait"])
    last_row = [row for row in read_log(folder) if "loss" in row][-1]
    assert 0 < last_row["process_hours"] == last_row["wall_hours"] <= first_summary["wall_hours"]
    assert last_row["tflops"] > 0 and not {"mfu", "energy_kwh", "gpu_hours"} & last_row.keys()

    # Starting a finished run again does not change its summary.
    assert command("train", config, *SHORT).returncode == 0
    assert json.loads((folder / "summary.json").read_text()) == first_summary

    # The newest checkpoint is lost. The time of its ten steps was spent all the same, so it stays in the totals.
    shutil.rmtree(folder / "checkpoints" / "step_00000020")
    result = command("train", config, *SHORT)
    assert result.returncode == 0, result.stderr
    second_summary = json.loads((folder / "summary.json").read_text())
    repeated_row = [row for row in read_log(folder) if row["step"] == 15 and "loss" in row][0]
    assert repeated_row["wall_hours"] > last_row["wall_hours"], "rows go on from those that were cut"
    assert second_summary["wall_hours"] > repeated_row["wall_hours"] and second_summary["samples"] == 80
    meta = json.loads((folder / "checkpoints" / "step_00000020" / "meta.json").read_text())
    assert meta["progression"]["spent"]["wall_hours"] > last_row["wall_hours"]

    # A new run that begins with these weights starts its totals at zero.
    assert command("train", config, *SHORT, f"save_loc={small_run}/next", f"trainer.resume={folder}/checkpoints/best",
                   "trainer.max_steps=25").returncode == 0  # fmt: skip
    new_run_summary = json.loads((small_run / "next" / "summary.json").read_text())
    assert new_run_summary["wall_hours"] < second_summary["wall_hours"] and new_run_summary["counted_since_step"] == 20


@pytest.mark.slow
def test_failed_run_has_summary(small_run: Path, command) -> None:
    config, folder = small_run / "config.yml", small_run / "run"
    # The gradient overflows. The run returns to its checkpoint once, and fails the second time.
    diverging = ("trainer.learning_rate=1e30", "trainer.grad_max_norm=null", "trainer.max_bad_steps=2")
    failed = command("train", config, *SHORT, *diverging)
    assert failed.returncode == 1 and "GFLOP/s per process" in failed.stderr, failed.stderr
    failed_summary = json.loads((folder / "summary.json").read_text())
    assert failed_summary["steps"] < 20 and failed_summary["wall_hours"] > 0
    # The time of the failed attempt stays in the totals.
    assert command("train", config, *SHORT).returncode == 0
    second_summary = json.loads((folder / "summary.json").read_text())
    assert second_summary["steps"] == 20 and second_summary["wall_hours"] > failed_summary["wall_hours"]
    assert min(row["wall_hours"] for row in read_log(folder) if "loss" in row) > failed_summary["wall_hours"]


@pytest.mark.parametrize("second_error", [ValueError("no meta device"), CreditError("no FLOPs")])
def test_error_in_summary_does_not_hide_error_of_run(
    small_run: Path, command, monkeypatch: pytest.MonkeyPatch, second_error: Exception
) -> None:
    def raise_data_error(*_: object) -> None:
        raise DataError("the field is gone")

    def raise_second_error(*_: object) -> None:
        raise second_error

    monkeypatch.setattr(trainer.Trainer, "_take_steps", raise_data_error)
    monkeypatch.setattr(trainer, "write_partial_summary", raise_second_error)
    failed = command("train", small_run / "config.yml", *SHORT)
    assert failed.returncode == 2 and "the field is gone" in failed.stderr.splitlines()[-1], failed.stderr
    assert json.loads((small_run / "run" / "STATUS").read_text())["reason"] == "the field is gone"
    assert f"no summary of the run: {type(second_error).__name__}: {second_error}" in failed.stderr


@pytest.mark.slow
def test_summary_includes_time_to_start_process_group(
    small_run: Path, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time to start the process group counts, because a thousand ranks need minutes to find each other."""

    @contextmanager
    def slow_group(*_: object) -> Iterator[None]:
        time.sleep(2.0)
        yield None

    monkeypatch.setattr(process_info, "process_group", slow_group)
    assert command("train", small_run / "config.yml", *SHORT, "trainer.max_steps=1").returncode == 0
    summary = json.loads((small_run / "run" / "summary.json").read_text())
    assert summary["time_shares"]["other"] * summary["wall_hours"] * 3600 > 2.0


@pytest.mark.slow
def test_run_that_stops_for_requeue_has_summary(small_run: Path, command) -> None:
    result = command("train", small_run / "config.yml", *SHORT, "trainer.walltime=1min")
    assert result.returncode == 85, result.stderr
    summary = json.loads((small_run / "run" / "summary.json").read_text())
    assert summary["steps"] == 1 and "1 of 20, 4 samples" in result.stderr
