"""Decisions to continue a chain, for different forms of job ids and for damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from credit.errors import CreditError
from credit.hpc.chain import decide_at_end, decide_at_start, decide_relaunch, read_jobs, record_jobs


def write_status(folder: Path, state: str, step: int, job_id: str) -> None:
    (folder / "STATUS").write_text(json.dumps({"status": state, "step": step, "reason": "", "job_id": job_id}))


def test_status_of_earlier_chain_is_ignored(tmp_path: Path) -> None:
    write_status(tmp_path, "failed", 10, "7.head")
    record_jobs(tmp_path, "train", "slurm", ["8"])
    assert decide_at_start(tmp_path, "8") == "go"
    write_status(tmp_path, "done", 20, "8")
    assert decide_at_end(tmp_path, "8") == "done"
    # Slurm has requeued the job although its run is done.
    assert decide_at_start(tmp_path, "8") == "done"
    record_jobs(tmp_path, "train", "slurm", ["9"])
    assert decide_at_start(tmp_path, "9") == "go", "a longer run may follow"


def test_server_name_in_job_id_may_be_shortened(tmp_path: Path) -> None:
    record_jobs(tmp_path, "train", "pbs", ["11.head"])
    assert decide_at_start(tmp_path, "11.head.site.edu") == "go"
    write_status(tmp_path, "requeue", 10, "11.head.site.edu")
    assert decide_at_end(tmp_path, "11.head") == "go"


def test_job_that_is_requeued_without_progress_fails(tmp_path: Path) -> None:
    for expected in ("go", "go", "failed"):
        assert decide_at_start(tmp_path, "5") == expected


def test_script_submitted_by_hand_continues(tmp_path: Path) -> None:
    record_jobs(tmp_path, "train", "pbs", ["1.head", "2.head"])
    assert decide_at_start(tmp_path, "77.head") == "go"
    write_status(tmp_path, "done", 10, "77.head")
    assert decide_at_end(tmp_path, "77.head") == "done"
    assert read_jobs(tmp_path)["train"]["ids"] == ["1.head", "2.head"]


def test_signal_before_training_is_no_failure(tmp_path: Path) -> None:
    decide_at_start(tmp_path, "5")
    assert decide_at_end(tmp_path, "5", "TERM") == "go"
    assert decide_at_end(tmp_path, "5") == "failed"


def test_new_job_removes_stop_file(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    decide_at_start(tmp_path, "5")
    assert not (tmp_path / "STOP").exists()


def test_truncated_files_are_handled(tmp_path: Path) -> None:
    decide_at_start(tmp_path, "5")
    with (tmp_path / "jobs" / "starts.jsonl").open("a") as file:
        file.write('{"job_id": "5", "st\n')
    (tmp_path / "STATUS").write_text('{"status": "ru')
    assert decide_at_start(tmp_path, "5") == "go"
    (tmp_path / "jobs.json").write_text("{")
    with pytest.raises(CreditError, match=r"jobs\.json: cannot be read"):
        read_jobs(tmp_path)


def test_launcher_is_relaunched_only_after_an_error(tmp_path: Path) -> None:
    for state, is_error, expected in [
        ("running", None, "go"), ("requeue", True, "go"), ("requeue", None, "done"), ("done", None, "done"),
    ]:  # fmt: skip
        flag = {} if is_error is None else {"is_error": is_error}
        (tmp_path / "STATUS").write_text(json.dumps({"status": state, "step": 1, "reason": "", "job_id": "5", **flag}))
        assert decide_relaunch(tmp_path, "5") == expected
