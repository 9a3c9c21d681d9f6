"""Parts of a comparison: done once, repeated if their inputs change, and named if they fail."""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

import pytest

from credit.compare.execution import Executor, Part, describe_failure, exit_on_sigterm, run_process


def test_a_part_is_done_once_and_repeated_if_its_inputs_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "scores.nc"
    calls = []

    def process(words: list[str], log_path: Path, stop_file: Path | None) -> int:
        calls.append(words[-2])
        result.touch()
        return 0

    monkeypatch.setattr("credit.compare.execution.run_process", process)
    part = Part("score a", "verify", tmp_path / "a.yml", ("seed=1",), result, depends_on=("x",))
    assert Executor(tmp_path).run(part) and Executor(tmp_path).run(part)
    assert calls == ["seed=1"]
    assert Executor(tmp_path).run(dataclasses.replace(part, overrides=("seed=2",)))
    assert Executor(tmp_path).run(dataclasses.replace(part, overrides=("seed=2",), depends_on=("y",)))
    assert calls == ["seed=1", "seed=2", "seed=2"]
    result.unlink()
    executor = Executor(tmp_path)
    assert executor.run(dataclasses.replace(part, overrides=("seed=2",), depends_on=("y",)))
    assert len(calls) == 4 and executor.list_failures() == []
    assert executor.seconds_of("score a") is not None and executor.seconds_of("score b") is None


def test_a_failure_is_named_with_its_message_and_log(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    code = "import sys; print('credit train: config a.yml: no such key'); sys.exit(2)"
    assert run_process([sys.executable, "-c", code], log) == 2
    assert describe_failure(log) == f"credit train: config a.yml: no such key (log {log})"
    # The message of an earlier attempt is not that of the last one.
    assert run_process([sys.executable, "-c", "raise ValueError('bad')"], log) == 1
    assert describe_failure(log) == f"ValueError: bad (log {log})"
    run_process([sys.executable, "-c", "import os; os._exit(1)"], log)
    assert describe_failure(log) == f"(log {log})"


def test_the_failed_part_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exit_codes = iter([1, 85, 0])
    monkeypatch.setattr("credit.compare.execution.run_process", lambda *arguments: next(exit_codes))
    part = Part("train a", "train", tmp_path / "a.yml", (), tmp_path)
    executor = Executor(tmp_path)
    assert [executor.run(part) for _ in range(3)] == [False, False, True]
    executor.mark_failed(part, "STATUS is requeue")
    assert set(executor.list_failures()) == {"train a failed: STATUS is requeue"}


def test_an_interrupted_training_is_asked_to_save(tmp_path: Path) -> None:
    # The process of the part ends when it sees the file STOP, as a training does, and asks its parent to stop.
    code = """
import os, pathlib, signal, sys, time
stop_file = pathlib.Path(sys.argv[1])
assert not stop_file.exists()
os.kill(os.getppid(), signal.SIGTERM)
while not stop_file.exists():
    time.sleep(0.01)
stop_file.with_name("saved").touch()
"""
    (tmp_path / "STOP").touch()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as exit_request, exit_on_sigterm():
        run_process([sys.executable, "-c", code, str(tmp_path / "STOP")], tmp_path / "log", tmp_path / "STOP")
    assert exit_request.value.code == 143
    assert (tmp_path / "saved").exists() and not (tmp_path / "STOP").exists()
    assert signal.getsignal(signal.SIGTERM) == handler
    # Other commands have nothing to save.
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    with pytest.raises(SystemExit), exit_on_sigterm():
        run_process([sys.executable, "-c", code], tmp_path / "log")
