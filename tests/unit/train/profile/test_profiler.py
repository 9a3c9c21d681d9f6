"""Tests of the order of the parts of a profile; without a run, the tests call `begin_step` themselves."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from credit.errors import CreditError
from credit.train.adamw import AdamW
from credit.train.muon import Muon
from credit.train.profile import profiler as profiler_module
from credit.train.profile.profiler import StepProfiler, _count_updated_bytes
from credit.train.profile.request import ProfileRequest
from credit.train.profile.spans import merge_intervals
from credit.utils.profiling import phases


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> StepProfiler:
    """Return a profiler of steps 6 to 9, on one rank of a CPU, that writes nothing."""
    monkeypatch.setattr(profiler_module, "choose_compute_precision", lambda config, sharded: "float32")
    monkeypatch.setattr(profiler_module, "measure_rates", lambda device, dtype: None)
    monkeypatch.setattr(StepProfiler, "_count_operations_by_pass", lambda self: None)
    monkeypatch.setattr(StepProfiler, "_write", lambda self, trace: None)
    parts = SimpleNamespace(
        total_steps=100,
        process_info=SimpleNamespace(world=1),
        mesh=SimpleNamespace(device_mesh=None),
        config=None,
        device=torch.device("cpu"),
    )
    return StepProfiler(ProfileRequest(num_steps=4), parts, steps_taken=0)


@pytest.mark.parametrize("checkpoint_step", [0, 6, 8])
def test_a_rollback_ends_the_profile(
    profiler: StepProfiler, checkpoint_step: int, caplog: pytest.LogCaptureFixture
) -> None:
    with profiler.resources, caplog.at_level(logging.WARNING):
        for step in range(9):
            profiler.begin_step(step)
        assert phases._recorder is profiler
        # Step 9 (number 8 from 0) diverges, and the run continues from a checkpoint.
        for step in range(checkpoint_step, 20):
            profiler.begin_step(step)
    assert "returned to an earlier step" in caplog.text
    # Steps 6 to 8 are complete.
    assert len(profiler._timed_windows) == 3 and not profiler._traced_windows
    assert phases._recorder is None


def test_windows_of_consecutive_steps_have_no_gap(profiler: StepProfiler) -> None:
    with profiler.resources:
        for step in range(9):
            profiler.begin_step(step)
    assert len(profiler._timed_windows) == 3
    assert len(merge_intervals(profiler._timed_windows)) == 1


def test_a_run_that_ends_in_the_warm_up_is_a_warning(profiler: StepProfiler, caplog: pytest.LogCaptureFixture) -> None:
    with profiler.resources, caplog.at_level(logging.WARNING):
        profiler.begin_step(0)
        profiler.finish()
    assert "no measured step was completed" in caplog.text


def test_a_full_disk_does_not_end_the_run(
    profiler: StepProfiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise CreditError("table.json: no space left")

    monkeypatch.undo()
    monkeypatch.setattr(profiler_module, "gather_accounts", lambda account: None)
    monkeypatch.setattr(StepProfiler, "_build_account", lambda self, account, trace: None)
    monkeypatch.setattr(StepProfiler, "_write_files", fail)
    with caplog.at_level(logging.WARNING):
        profiler._write(None)
    assert "table.json: no space left" in caplog.text
    profiler.resources.close()


def test_bytes_of_an_update_are_counted() -> None:
    weight = nn.Parameter(torch.zeros(10, 3))
    groups = [{"params": [weight], "lr": 1e-3, "weight_decay": 0.0}]
    optimizer = AdamW(groups, 1e-3, (0.9, 0.95))
    # Reads: the gradient twice, weight and two moments. Writes: weight and two moments.
    assert _count_updated_bytes(SimpleNamespace(optimizer=optimizer, average=None)) == 8 * 120
    # The average is read and written, and the weight is read once more.
    assert _count_updated_bytes(SimpleNamespace(optimizer=optimizer, average=object())) == 11 * 120
    muon = Muon.__new__(Muon)
    assert _count_updated_bytes(SimpleNamespace(optimizer=muon, average=None)) is None
