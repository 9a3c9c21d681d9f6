"""Ctrl-C during a command gives exit status 130 and one line on standard error."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from credit.cli.console.interrupt import InterruptGuard

# Program that runs `credit` with its arguments after the first two. These are a function and a number: that call of the
# function sends SIGINT to the process.
PROGRAM = """
import importlib, os, signal, sys
from credit.cli.main import main

target, number, *arguments = sys.argv[1:]
module_name, _, function_name = target.partition(":")
owner = importlib.import_module(module_name)
*owners, function_name = function_name.split(".")
for name in owners:
    owner = getattr(owner, name)
original = getattr(owner, function_name)
calls = 0

def interrupt(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(number):
        os.kill(os.getpid(), signal.SIGINT)
    return original(*args, **kwargs)

setattr(owner, function_name, interrupt)
sys.argv = ["credit", *arguments]
sys.exit(main())
"""
WRITE = "credit.data.store.store_writer:hash_fields"
READ = "credit.data.sources.source_reader:SourceReader.read"
INTERRUPTIONS = [
    ("pipe", "", "credit.config.load:read_config", 1, ["check", "config.yml"]),
    ("terminal", "", READ, 2, ["check", "config.yml"]),
    ("pipe", "", WRITE, 2, ["preprocess", "config.yml", "data.store=new.zarr"]),
    ("terminal", "run", "credit.forecast.stepper:Stepper.decode", 1, ["rollout", "config.yml"]),
    ("pipe", "run", "credit.forecast.stepper:Stepper.decode", 1, ["verify", "config.yml", "--online"]),
]


@pytest.fixture(autouse=True)
def _enable_sigint() -> Iterator[None]:
    """Enable SIGINT in this process and its children, because a shell starts background jobs with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def run_interrupted(
    folder: Path, target: str, number: int, arguments: list[str], terminal: bool
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, target, str(number), *arguments]
    if not terminal:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    controller, follower = pty.openpty()
    process = subprocess.Popen(command, cwd=folder, stdout=follower, stderr=follower, start_new_session=True)
    os.close(follower)
    output = b""
    try:
        while block := os.read(controller, 4096):
            output += block
    except OSError:
        # Linux reports the end of a pseudo-terminal as an error.
        pass
    os.close(controller)
    return subprocess.CompletedProcess(command, process.wait(300), "", output.decode())


@pytest.mark.parametrize(("output", "needs", "target", "number", "arguments"), INTERRUPTIONS)
def test_interrupted_commands_end_with_130(
    output: str,
    needs: str,
    target: str,
    number: int,
    arguments: list[str],
    worlds: Callable[[str], Path],
) -> None:
    process = run_interrupted(worlds(needs), target, number, arguments, output == "terminal")
    assert process.returncode == 130, process
    assert "interrupted" in process.stderr.splitlines()[-1]
    for unexpected in ("Traceback", "Task was destroyed", "Exception ignored", "KeyboardInterrupt", "futures"):
        assert unexpected not in process.stderr


def test_interrupted_training_saves_first(world: Path) -> None:
    process = run_interrupted(world, "credit.train.step:TrainingStep.__call__", 1, ["train", "config.yml"], False)
    assert process.returncode == 130, process
    assert "requeue" in process.stdout
    assert (world / "run" / "checkpoints" / "latest").exists()
    assert "Traceback" not in process.stderr


def test_quiet_training_prints_the_result_alone(world: Path) -> None:
    command = [sys.executable, "-m", "credit.cli.main", "train", "config.yml", "--quiet"]
    process = subprocess.run(command, cwd=world, capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stdout, process.stderr) == (0, "done: run\n", "")


def test_interrupt_inside_a_destructor_is_not_lost() -> None:
    class Interrupting:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def delete_value() -> None:
        value = Interrupting()
        del value
        time.sleep(10)

    with InterruptGuard() as guard:
        with pytest.raises(KeyboardInterrupt):
            delete_value()
        assert guard.interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_sigint_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Background jobs of a shell ignore SIGINT, and the guard must not change that."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with InterruptGuard():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
