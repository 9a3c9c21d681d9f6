"""Asynchronous writer: bounded memory, errors that reach the model's thread, no incomplete files."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from credit.calendar import Calendar
from credit.errors import CreditError
from credit.forecast.io.async_writer import BackgroundWriter
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.rollout import ForecastStart, build_starts
from tests.unit.forecast.test_forecast_writer import GRID, INITIAL, LEADS, NAMES, make_writer

STEP = 360
TIMES = [Calendar().parse(text) for text in INITIAL]


def build_background_writer(writer: ForecastWriter) -> BackgroundWriter:
    return BackgroundWriter(writer, {lead: n for n, lead in enumerate(LEADS)}, STEP, "a model", TIMES)


def build_output(step: int, starts: list[ForecastStart]) -> torch.Tensor:
    """Return fields whose value encodes step and member."""
    value = torch.tensor([1000.0 * s.member + step for s in starts])
    return value[:, None, None, None].expand(-1, len(NAMES), *GRID.shape).contiguous()


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_members_of_several_batches_complete_a_forecast(tmp_path: Path, format: str) -> None:
    writer = make_writer(tmp_path, members=3, format=format)
    starts = build_starts(TIMES, 3)
    with build_background_writer(writer) as running:
        for batch in (starts[:2], starts[2:5], starts[5:]):
            for step in range(1, 5):
                running.put(batch, step, build_output(step, batch))
    archive = open_forecasts(tmp_path)
    assert archive.members == 3 and archive.initial_minutes.tolist() == TIMES
    t2m = archive.channel_names.index("t2m")
    for number, step in enumerate((1, 2, 4)):
        read = archive.read_members(TIMES[1], number)[:, t2m, 0, 0]
        assert read.tolist() == [step, 1000 + step, 2000 + step]
    assert archive.read(TIMES[0])[2, t2m, 0, 0] == 1004
    assert all(make_writer(tmp_path, members=3, format=format).is_complete(time) for time in TIMES)


def test_two_processes_write_the_members_of_a_zarr_store(tmp_path: Path) -> None:
    """Each process writes other members. The forecast is complete only after one of them has marked it."""
    starts = build_starts(TIMES[:1], 3)
    writers = []
    for members in (starts[:2], starts[2:]):
        writer = make_writer(tmp_path, members=3, format="zarr")
        with build_background_writer(writer) as running:
            for step in range(1, 5):
                running.put(members, step, build_output(step, members))
                assert running.needs_step(members, step) == (STEP * step in LEADS)
            running.flush()
        writers.append(writer)
        assert not writer.is_complete(TIMES[0])
    writers[0].mark_complete(TIMES[0])
    assert [writers[1].is_complete(time) for time in TIMES] == [True, *[False] * (len(TIMES) - 1)]
    archive = open_forecasts(tmp_path)
    t2m = archive.channel_names.index("t2m")
    assert archive.read_members(TIMES[0], 1)[:, t2m, 0, 0].tolist() == [2, 1002, 2002]


def test_flush_waits_for_queued_steps_and_raises_their_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, may_write, put = build_starts(TIMES[:1]), threading.Event(), ForecastWriter.put
    written = []

    def wait_and_put(*arguments: object) -> None:
        may_write.wait(20)
        put(*arguments)
        written.append(arguments)

    monkeypatch.setattr(ForecastWriter, "put", wait_and_put)
    with build_background_writer(make_writer(tmp_path)) as running:
        running.put(starts, 1, build_output(1, starts))
        running.put(starts, 2, build_output(2, starts))
        threading.Timer(0.2, may_write.set).start()
        running.flush()
        assert len(written) == 2
    with (
        pytest.raises(CreditError, match="not finite at 6 h"),
        build_background_writer(make_writer(tmp_path)) as running,
    ):
        running.put(starts, 1, torch.full_like(build_output(1, starts), torch.nan))
        running.flush()


def test_steps_of_lagged_members_before_the_initial_time_are_skipped(tmp_path: Path) -> None:
    starts = build_starts(TIMES[:1], 2, lag_minutes=STEP)
    with build_background_writer(make_writer(tmp_path, members=2)) as running:
        for step in range(1, 6):
            running.put(starts, step, build_output(step, starts))
    archive = open_forecasts(tmp_path)
    t2m = archive.channel_names.index("t2m")
    assert [archive.read_members(TIMES[0], n)[:, t2m, 0, 0].tolist() for n in range(3)] == [
        [1, 1002], [2, 1003], [4, 1005],
    ]  # fmt: skip


def test_number_of_waiting_steps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, writer, starts = (
        threading.Event(),
        make_writer(tmp_path, lead_minutes=[STEP * n for n in range(1, 11)]),
        [],
    )
    queued_steps, put = [], ForecastWriter.put
    monkeypatch.setattr(ForecastWriter, "put", lambda *arguments: (may_write.wait(20), put(*arguments)))
    starts = build_starts(TIMES[:1])
    running = BackgroundWriter(writer, {STEP * n: n - 1 for n in range(1, 11)}, STEP, "a model", TIMES)

    def run_model() -> None:
        with running:
            for step in range(1, 11):
                running.put(starts, step, build_output(step, starts))
                queued_steps.append(step)

    thread = threading.Thread(target=run_model)
    thread.start()
    thread.join(1.0)
    assert thread.is_alive() and len(queued_steps) <= 3, "one is being written, two wait"
    may_write.set()
    thread.join(30)
    assert not thread.is_alive() and len(queued_steps) == 10 and writer.is_complete(TIMES[0])


def test_error_of_the_thread_reaches_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, writer = build_starts(TIMES[:1]), make_writer(tmp_path)

    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("credit.forecast.io.files.netcdf.define_variable", raise_disk_full)
    queued_steps = []
    with pytest.raises(CreditError, match=r"forecast_2001-04-01T00.nc: cannot be written \(No space"):  # noqa: SIM117
        with build_background_writer(writer) as running:
            for number in range(100):
                running.put(starts, 1, build_output(1, starts))
                queued_steps.append(number)
    assert len(queued_steps) < 10
    assert not list(tmp_path.iterdir())


def test_fields_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    starts = build_starts(TIMES[:1], 2)
    with pytest.raises(CreditError, match=r"a model: forecast from 2001-04-01T00:00, member 1: not finite at 12 h"):  # noqa: SIM117
        with build_background_writer(make_writer(tmp_path, members=2)) as running:
            for step in range(1, 5):
                fields = build_output(step, starts)
                fields[1, 2, 3, 4] = np.nan if step > 1 else 0.0
                running.put(starts, step, fields)
    assert not list(tmp_path.iterdir())


def test_error_of_the_model_removes_incomplete_files(tmp_path: Path) -> None:
    starts = build_starts(TIMES[:1])
    with pytest.raises(KeyboardInterrupt), build_background_writer(make_writer(tmp_path)) as running:
        running.put(starts, 1, build_output(1, starts))
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
