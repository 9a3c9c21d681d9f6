"""Signals, the file STOP and the walltime are requests; a second signal is not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from credit.train.preempt import StopRequest


@pytest.fixture
def handlers() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


def test_signal_then_now(tmp_path: Path, handlers: None) -> None:
    stop = StopRequest(tmp_path, None)
    try:
        assert stop.reason(0, 0) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.reason(0, 0) == "signal SIGUSR1"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        stop.restore()


def test_file(tmp_path: Path, handlers: None) -> None:
    stop = StopRequest(tmp_path, None)
    (tmp_path / "STOP").touch()
    assert stop.reason(0, 0) == "file STOP"
    assert not (tmp_path / "STOP").exists(), "the next run must not stop at once"
    stop.restore()


def test_walltime_leaves_time_to_save(tmp_path: Path, handlers: None) -> None:
    stop = StopRequest(tmp_path, 3600)
    assert stop.reason(save_seconds=100, step_seconds=10) is None
    assert stop.reason(save_seconds=3500, step_seconds=45) == "walltime"
    stop.restore()
