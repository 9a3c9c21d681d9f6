"""Tests that a logger that is slow or fails neither slows nor stops the training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from credit.errors import ConfigError
from credit.train.loggers import background
from credit.train.loggers.background import BackgroundLogger, close_loggers
from credit.train.loggers.base import (
    LoggedPicture,
    LoggedRow,
    LoggedRun,
    RunLogger,
    find_logger_class,
    register_logger,
    require_loggers,
)
from credit.train.monitor.metrics_log import MetricsLog, write_status

RUN = LoggedRun("name", "id", Path("run"), {"seed": 1}, 0)


class Recorder(RunLogger):
    """Logger that records its calls."""

    package = "json"

    def __init__(self) -> None:
        self.calls: list[object] = []

    def start(self, run: LoggedRun) -> str:
        self.calls.append(run)
        return "address"

    def log(self, rows: Sequence[LoggedRow]) -> None:
        self.calls += rows

    def log_image(self, picture: LoggedPicture) -> None:
        self.calls.append(picture)

    def close(self, status: str) -> None:
        self.calls.append(status)


def list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_everything_arrives_in_order(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    log = BackgroundLogger("recorder", recorder, RUN)
    rows = [LoggedRow(step, {"loss": 1.0 / step}) for step in range(1, 1001)]
    for row in rows[:500]:
        log.log(row)
    log.log_image(LoggedPicture("map", b"png", 500))
    for row in rows[500:]:
        log.log(row)
    close_loggers([log], "done")
    assert recorder.calls == [RUN, *rows[:500], LoggedPicture("map", b"png", 500), *rows[500:], "done"]
    assert list_warnings(caplog) == []


def test_the_printed_address_can_be_used(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell does not replace ``~`` within a word, so the path of the home folder stays; passwords are hidden."""
    monkeypatch.setenv("HOME", "/people/someone")

    class Local(Recorder):
        def start(self, run: LoggedRun) -> str:
            return (
                "mlflow ui --backend-store-uri sqlite:////people/someone/mlflow.db, https://user:secret-password@host/"
            )

    caplog.set_level(logging.INFO)
    close_loggers([BackgroundLogger("local", Local(), RUN)], "done")
    assert "logging to local: mlflow ui --backend-store-uri sqlite:////people/someone/mlflow.db" in caplog.text
    assert "secret-password" not in caplog.text


def test_the_first_error_is_a_warning_and_later_rows_still_arrive(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Recorder):
        def log(self, rows: Sequence[LoggedRow]) -> None:
            super().log(rows)
            raise ConnectionError("https://user:secret-password@host/ is down\nmore")

    recorder = Failing()
    log = BackgroundLogger("failing", recorder, RUN)
    for step in range(3):
        log.log(LoggedRow(step, {}))
        while len(recorder.calls) < step + 2:
            time.sleep(0.001)
    close_loggers([log], "failed")
    assert [row.step for row in recorder.calls[1:-1]] == [0, 1, 2] and recorder.calls[-1] == "failed"
    (message,) = list_warnings(caplog)
    assert "failing failed" in message and "ConnectionError" in message and "metrics.jsonl contains all rows" in message
    assert "secret-password" not in message and "more" not in message


def test_a_start_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Unreachable(Recorder):
        def start(self, run: LoggedRun) -> str:
            raise TimeoutError("no answer")

    recorder = Unreachable()
    log = BackgroundLogger("unreachable", recorder, RUN)
    log.log(LoggedRow(1, {}))
    close_loggers([log], "done")
    assert recorder.calls == []
    assert len(list_warnings(caplog)) == 1 and "unreachable not used: TimeoutError: no answer" in caplog.text


def test_the_training_does_not_wait_for_a_logger_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(background, "_MAX_WAITING", 10)
    release = threading.Event()

    class Hanging(Recorder):
        def start(self, run: LoggedRun) -> str:
            release.wait(30)
            return ""

    logs = [BackgroundLogger("hanging", Hanging(), RUN), BackgroundLogger("other", Hanging(), RUN)]
    start = time.monotonic()
    for step in range(12):
        for log in logs:
            log.log(LoggedRow(step, {}))
    close_loggers(logs, "done")
    seconds = time.monotonic() - start
    release.set()
    # Both loggers share the time limit.
    assert 0.2 <= seconds < 2
    # A logger gives one warning, because its queue was full before the end.
    assert len(list_warnings(caplog)) == 2 and "hanging is too slow: 10 rows are in the queue" in caplog.text


def test_a_slow_logger_writes_all_rows_of_its_full_queue(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_MAX_WAITING", 5)
    monkeypatch.setattr(background, "CLOSE_SECONDS", 5.0)
    release = threading.Event()

    class Slow(Recorder):
        def start(self, run: LoggedRun) -> str:
            release.wait(30)
            return super().start(run)

    recorder = Slow()
    log = BackgroundLogger("slow", recorder, RUN)
    for step in range(8):
        log.log(LoggedRow(step, {}))
    threading.Timer(0.1, release.set).start()
    close_loggers([log], "done")
    assert [row.step for row in recorder.calls[1:-1]] == [0, 1, 2, 3, 4]
    assert recorder.calls[-1] == "done"
    assert len(list_warnings(caplog)) == 1 and "further rows are dropped" in caplog.text


def test_loggers_get_the_finite_numbers_of_a_row(tmp_path: Path) -> None:
    recorder = Recorder()
    log = MetricsLog(tmp_path, 0, enabled=True, loggers=[BackgroundLogger("recorder", recorder, RUN)])
    log.write({"step": 4, "loss": 0.5, "lr": float("inf")})
    log.write({"step": 4, "valid": {"skill": 0.9, "loss": 0.4}})
    log.write({"step": 4, "early": {"rmse/z500/24h": 2.0, "rmse/z500/48h": None}})
    picture = tmp_path / "early_map.png"
    picture.write_bytes(b"first")
    log.add_picture(picture, 4)
    # The next preview replaces the file, perhaps before a slow logger reads it.
    picture.write_bytes(b"second")
    write_status(tmp_path, "requeue", 4, "", "")
    log.close()
    assert recorder.calls[1:] == [
        LoggedRow(4, {"loss": 0.5}),
        LoggedRow(4, {"valid/skill": 0.9, "valid/loss": 0.4}),
        LoggedRow(4, {"early/rmse/z500/24h": 2.0}),
        LoggedPicture("early_map", b"first", 4),
        "requeue",
    ]


def test_logger_names_must_be_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from credit.train.loggers import base

    # The built-in loggers register themselves at the first call.
    find_logger_class("tensorboard")
    monkeypatch.setattr(base, "_LOGGERS", dict(base._LOGGERS))
    with pytest.raises(ConfigError, match=r'trainer\.loggers: "wandbb" is not a logger.*wandb'):
        require_loggers(["wandbb"])
    register_logger("recorder")(Recorder)
    require_loggers(["recorder"])
    assert find_logger_class("recorder") is Recorder
    Recorder.package = "no_such_package"
    try:
        with pytest.raises(ConfigError, match="recorder needs the package no_such_package"):
            require_loggers(["recorder"])
    finally:
        Recorder.package = "json"

    class Other(Recorder):
        pass

    with pytest.raises(ConfigError, match='logger name "recorder" .* is taken'):
        register_logger("recorder")(Other)
    with pytest.raises(ConfigError, match="must derive from"):
        register_logger("integer")(int)
