"""Tests of the log of metrics: one row a step after interruptions, rollbacks and full disks."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path

import pytest

from credit.train.monitor.metrics_log import MetricsLog, rank_log, write_status
from credit.train.monitor.run_files import is_repeated_failure


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, enabled=True)
    for step in range(1, 6):
        log.write({"step": step, "loss": 1.0})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the process was killed during the write
    log = MetricsLog(tmp_path, 3, enabled=True)
    log.write({"step": 4, "loss": 2.0})
    log.close()
    assert [(row["step"], row["loss"]) for row in read_rows(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def test_a_run_that_goes_back_has_one_row_a_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, enabled=True)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0})
    log.rewind(1)
    log.write({"step": 2, "loss": 2.0})
    log.close()
    assert [(row["step"], row["loss"]) for row in read_rows(tmp_path)] == [(1, 1.0), (2, 2.0)]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, enabled=True)
    log.write({"step": 1, "loss": float("nan"), "valid": {"loss": float("inf"), "rmse": 2.0}})
    log.close()
    assert read_rows(tmp_path) == [{"step": 1, "loss": None, "valid": {"loss": None, "rmse": 2.0}}]


def test_rows_are_written_later_if_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(tmp_path, 0, enabled=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))  # the limit is in the middle of the second row
    try:
        for step in (1, 2, 3):
            log.write({"step": step, "loss": 1.0})
            log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "metrics.jsonl: cannot be written (File too large)" in caplog.text
    log.close()
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3]


def test_the_log_of_a_rank_has_its_messages_and_the_final_error(tmp_path: Path) -> None:
    logger = logging.getLogger("credit.somewhere")
    with pytest.raises(KeyError), rank_log(tmp_path, 3):
        logger.warning("this happened")
        raise KeyError("why")
    logger.warning("after it")
    text = (tmp_path / "logs" / "rank_00003.log").read_text()
    assert "WARNING credit.somewhere: this happened" in text and "KeyError: 'why'" in text and "Traceback" in text
    assert "after it" not in text


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, enabled=False)
    log.write({"step": 1})
    log.close()
    assert not list(tmp_path.iterdir())


def test_status(tmp_path: Path) -> None:
    write_status(tmp_path, "requeue", 12, "walltime", "77")
    expected = {"status": "requeue", "step": 12, "reason": "walltime", "job_id": "77"}
    assert json.loads((tmp_path / "STATUS").read_text()) == expected


def test_a_failure_is_repeated_only_at_the_same_step() -> None:
    status = {"status": "requeue", "step": 4, "reason": "shape '[2]' is invalid", "job_id": "7"}
    assert is_repeated_failure(status, 4, "shape '[2]' is invalid")
    # The status of the earlier start may also be failed.
    assert is_repeated_failure({**status, "status": "failed"}, 4, "shape '[2]' is invalid")
    assert not is_repeated_failure(status, 8, "shape '[2]' is invalid"), "a new checkpoint is progress"
    assert not is_repeated_failure(status, 4, "Connection closed by peer [10.0.0.1]:7")
    assert not is_repeated_failure({**status, "status": "running"}, 4, "shape '[2]' is invalid")
    assert not is_repeated_failure({}, 0, "")
