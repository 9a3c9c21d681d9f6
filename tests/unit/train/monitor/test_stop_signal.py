"""Tests of stop requests by signal, file STOP and walltime; a second signal interrupts at once."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from credit.cli import train
from credit.errors import ConfigError
from credit.parallel.process_info import ProcessInfo
from credit.train.monitor import stop_signal
from credit.train.monitor.stop_signal import StopSignal
from tests.unit.hpc.measured import small_config


@pytest.fixture
def unchanged_handlers() -> None:
    """Require that a test restores the signal handlers."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_second_signal_interrupts_at_once(tmp_path: Path, unchanged_handlers: None) -> None:
    with StopSignal(tmp_path, None, {}) as stop:
        assert stop.find_reason(0) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.find_reason(0) == "signal SIGUSR1"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_file_stop_is_removed_and_its_request_remains(tmp_path: Path, unchanged_handlers: None) -> None:
    with StopSignal(tmp_path, None, {}) as stop:
        (tmp_path / "STOP").touch()
        assert stop.find_reason(0) == "file STOP"
        assert not (tmp_path / "STOP").exists(), "the next run must not stop at once"
        assert stop.find_reason(0) == "file STOP", "a request stands"


def test_only_rank_0_looks_for_the_file(
    tmp_path: Path, unchanged_handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "STOP").touch()
    with StopSignal(None, None, {}) as stop:
        assert stop.find_reason(0) is None
    folders_by_rank = {}

    def record_folder(folder: Path | None, *_: object) -> None:
        folders_by_rank[rank] = folder
        raise InterruptedError

    monkeypatch.setattr(stop_signal, "StopSignal", record_folder)
    config = small_config(f"save_loc={tmp_path}", "trainer.device=cpu")
    for rank in (0, 1):
        with pytest.raises(InterruptedError):
            train._train(config, ProcessInfo(rank, 2))
    assert folders_by_rank == {0: tmp_path, 1: None}


@pytest.mark.parametrize("by", ["walltime", "end of the job"])
def test_a_run_stops_in_time_to_save(tmp_path: Path, unchanged_handlers: None, by: str) -> None:
    near_limit, far_limit = 3600.0, 36000.0
    walltime, job = (near_limit, far_limit) if by == "walltime" else (far_limit, near_limit)
    with StopSignal(tmp_path, walltime, {"CREDIT_JOB_END": f"{time.time() + job:.0f}"}) as stop:
        assert stop.find_reason(110) is None
        assert stop.find_reason(3545) == by


def test_an_end_of_the_job_that_is_no_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CREDIT_JOB_END='tomorrow' is not a time; the job script must set it"):
        StopSignal(tmp_path, None, {"CREDIT_JOB_END": "tomorrow"})


def test_a_transient_file_system_error_does_not_stop_the_run(
    tmp_path: Path, unchanged_handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_stale_handle(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with StopSignal(tmp_path, None, {}) as stop:
        (tmp_path / "STOP").touch()
        with monkeypatch.context() as failing:
            failing.setattr(os, "stat", raise_stale_handle)
            assert stop.find_reason(0) is None
        assert stop.find_reason(0) == "file STOP"


@pytest.mark.parametrize(("number", "is_interrupt"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ctrl_c_is_distinguished_from_other_signals(
    tmp_path: Path, unchanged_handlers: None, number: signal.Signals, is_interrupt: bool
) -> None:
    with StopSignal(tmp_path, None, {}) as stop:
        assert not stop.is_interrupt
        os.kill(os.getpid(), number)
        assert stop.find_reason(0) == f"signal {number.name}"
        assert stop.is_interrupt == is_interrupt
