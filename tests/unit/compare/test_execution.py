"""Tests of the parts of a comparison: run once, repeated if inputs change, and named if they fail."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from credit.compare.execution import (
    DONE,
    ComparisonPart,
    Executor,
    HostSlots,
    RunningPart,
    describe_failure,
    divide_host_into_slots,
    exit_on_sigterm,
    start_process,
    stop_parts,
)
from credit.errors import ConfigError
from tests.unit.compare.finished_process import FinishedProcess


def test_a_part_runs_once_and_again_if_its_inputs_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "scores.nc"
    calls = []

    def start(words: list[str], log_path: Path, environment: dict[str, str]) -> FinishedProcess:
        calls.append(words[-2])
        result.touch()
        return FinishedProcess(0)

    monkeypatch.setattr("credit.compare.execution.start_process", start)
    part = ComparisonPart("score a", "verify", tmp_path / "a.yml", ("seed=1",), result, depends_on=("x",))
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
    assert start_process([sys.executable, "-c", code], log, os.environ).wait() == 2
    assert describe_failure(log) == f"credit train: config a.yml: no such key (log {log})"
    # The message of an earlier attempt is not that of the last one.
    assert start_process([sys.executable, "-c", "raise ValueError('bad')"], log, os.environ).wait() == 1
    assert describe_failure(log) == f"ValueError: bad (log {log})"
    start_process([sys.executable, "-c", "import os; os._exit(1)"], log, os.environ).wait()
    assert describe_failure(log) == f"(log {log})"


def test_a_failed_part_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exit_codes = iter([1, 85, 0])
    monkeypatch.setattr("credit.compare.execution.start_process", lambda *arguments: FinishedProcess(next(exit_codes)))
    part = ComparisonPart("train a", "train", tmp_path / "a.yml", (), tmp_path)
    executor = Executor(tmp_path)
    assert [executor.run(part) for _ in range(3)] == [False, False, True]
    executor.mark_failed(part, "STATUS is requeue")
    assert set(executor.list_failures()) == {"train a failed: STATUS is requeue"}


# The process of this part ends when it sees the file STOP, as a training does. It asks its parent to stop.
TRAINING = """
import os, pathlib, signal, sys, time
stop_file = pathlib.Path(sys.argv[1])
assert not stop_file.exists()
os.kill(os.getppid(), signal.SIGTERM)
while not stop_file.exists():
    time.sleep(0.01)
stop_file.with_name("saved").touch()
"""


class ScriptPart(ComparisonPart):
    """A part whose process runs a Python script, with the name of the file STOP as its argument."""

    def command_line(self) -> list[str]:
        """Return the command line; `overrides[0]` is the script."""
        return [sys.executable, "-c", self.overrides[0], str(self.stop_file)]


def test_an_interrupted_comparison_stops_its_processes(tmp_path: Path) -> None:
    # A file that is left from an earlier call does not stop the training at once.
    (tmp_path / "STOP").touch()
    handler = signal.getsignal(signal.SIGTERM)
    training = ScriptPart("train a", "train", tmp_path, (TRAINING,), tmp_path / "summary.json")
    # Other commands have nothing to save, and are terminated.
    scoring = ScriptPart("score a", "verify", tmp_path, ("import time; time.sleep(60)",), tmp_path / "scores.nc")
    with pytest.raises(SystemExit) as exit_request, exit_on_sigterm():
        Executor(tmp_path, HostSlots(2)).run_all([scoring, training])
    assert exit_request.value.code == 143
    assert (tmp_path / "saved").exists() and not (tmp_path / "STOP").exists()
    assert signal.getsignal(signal.SIGTERM) == handler
    # Neither part is recorded, so both are run again.
    assert not (tmp_path / "parts.json").exists()


def test_a_part_without_a_folder_is_terminated(tmp_path: Path) -> None:
    part = ComparisonPart("train a", "train", tmp_path, (), tmp_path / "missing" / "summary.json")
    process = start_process([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", os.environ)
    stop_parts([RunningPart(part, 0, process, 0.0)])
    assert process.returncode == -signal.SIGTERM


@pytest.mark.timeout(60)
def test_parts_run_at_the_same_time_each_with_its_share(tmp_path: Path) -> None:
    # Each process waits for the file of the other one, so one after the other would never end.
    script = """
import os, pathlib, sys, time
folder, other = pathlib.Path(sys.argv[1]).parent.parent, {other!r}
(folder / {name!r}).write_text(os.environ["OMP_NUM_THREADS"] + " " + os.environ["CUDA_VISIBLE_DEVICES"])
while not (folder / other).exists():
    time.sleep(0.01)
sys.exit({code})
"""
    parts = []
    for name, other, code in (("a", "b", 0), ("b", "a", 3), ("c", "a", 0)):
        text = script.format(name=name, other=other, code=code)
        parts.append(ScriptPart(f"train {name}", "train", tmp_path, (text,), tmp_path / f"run_{name}" / "summary.json"))
        parts[-1].result.parent.mkdir()
        parts[-1].result.touch()
    slots = HostSlots(2, num_threads=3, devices=["4", "5", "6", "7"])
    executor = Executor(tmp_path, slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        assert executor.run_all(parts) == [True, False, True]
    assert {(tmp_path / "a").read_text(), (tmp_path / "b").read_text()} == {"3 4,5", "3 6,7"}
    records = json.loads((tmp_path / "parts.json").read_text())
    assert [records[part.name]["exit_code"] for part in parts] == [0, 3, 0]
    assert records["train a"]["status"] == DONE
    assert len(executor.list_failures()) == 1


def test_a_part_without_its_result_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("credit.compare.execution.start_process", lambda *arguments: FinishedProcess(0))
    executor = Executor(tmp_path)
    assert not executor.run(ComparisonPart("train a", "train", tmp_path / "a.yml", (), tmp_path / "summary.json"))
    (failure,) = executor.list_failures()
    assert f"train a failed: {tmp_path}/summary.json is missing" in failure


def test_an_error_stops_the_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ScriptPart("score a", "verify", tmp_path, ("import time; time.sleep(60)",), tmp_path / "scores.nc")
    quick = ScriptPart("score b", "verify", tmp_path, ("pass",), tmp_path / "scores.nc")
    stopped_parts = []
    monkeypatch.setattr("credit.compare.execution.stop_parts", lambda running: stopped_parts.extend(running))

    def fail(self: Executor) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Executor, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        Executor(tmp_path, HostSlots(2)).run_all([slow, quick])
    assert [running_part.part.name for running_part in stopped_parts] == ["score a"]
    stop_parts(stopped_parts)
    assert stopped_parts[0].process.returncode == -signal.SIGTERM


def test_the_host_is_divided_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert divide_host_into_slots(1, 4) == HostSlots()
    assert divide_host_into_slots(4, 2) == HostSlots(4, 2, [])
    assert divide_host_into_slots(16, 4) == HostSlots(16, 1, [])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert divide_host_into_slots(2, 2) == HostSlots(2, 4, ["0", "1", "2", "3"])
    assert divide_host_into_slots(3, 1).devices == ["0", "1", "2"]
    # The GPUs of a job on a cluster may have other numbers.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")
    assert divide_host_into_slots(2, 1).devices == ["2", "3"]
    with pytest.raises(ConfigError, match="--jobs 3 --ranks 2: need 6 GPUs, but this host has 4"):
        divide_host_into_slots(3, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,9")
    with pytest.raises(ConfigError, match="names 2 GPUs, but torch finds 4"):
        divide_host_into_slots(2, 1)
    # A smaller number of threads from the user is kept, but not one that is meant for a single process.
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert HostSlots(2, 8).build_environment(1)["OMP_NUM_THREADS"] == "5"
    assert HostSlots(4, 2).build_environment(1)["OMP_NUM_THREADS"] == "2"
