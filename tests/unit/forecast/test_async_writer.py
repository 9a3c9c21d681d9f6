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


def background(writer: ForecastWriter) -> BackgroundWriter:
    return BackgroundWriter(writer, {lead: n for n, lead in enumerate(LEADS)}, STEP, "a model", TIMES)


def output(step: int, starts: list[ForecastStart]) -> torch.Tensor:
    """Fields whose value tells step and member."""
    value = torch.tensor([1000.0 * s.member + step for s in starts])
    return value[:, None, None, None].expand(-1, len(NAMES), *GRID.shape).contiguous()


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_members_of_several_batches_complete_a_forecast(tmp_path: Path, format: str) -> None:
    writer = make_writer(tmp_path, members=3, format=format)
    starts = build_starts(TIMES, 3)
    with background(writer) as running:
        for batch in (starts[:2], starts[2:5], starts[5:]):
            for step in range(1, 5):
                running.put(batch, step, output(step, batch))
    archive = open_forecasts(tmp_path)
    assert archive.members == 3 and archive.initial_minutes.tolist() == TIMES
    t2m = archive.channel_names.index("t2m")
    for number, step in enumerate((1, 2, 4)):
        read = archive.read_members(TIMES[1], number)[:, t2m, 0, 0]
        assert read.tolist() == [step, 1000 + step, 2000 + step]
    assert archive.read(TIMES[0])[2, t2m, 0, 0] == 1004
    assert all(make_writer(tmp_path, members=3, format=format).is_complete(time) for time in TIMES)


def test_two_processes_write_the_members_of_a_zarr_store(tmp_path: Path) -> None:
    """Each writes other members, and the forecast counts only after one of them has marked it."""
    starts = build_starts(TIMES[:1], 3)
    writers = []
    for members in (starts[:2], starts[2:]):
        writer = make_writer(tmp_path, members=3, format="zarr")
        with background(writer) as running:
            for step in range(1, 5):
                running.put(members, step, output(step, members))
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
    starts, gate, put = build_starts(TIMES[:1]), threading.Event(), ForecastWriter.put
    written = []

    def put_later(*arguments: object) -> None:
        gate.wait(20)
        put(*arguments)
        written.append(arguments)

    monkeypatch.setattr(ForecastWriter, "put", put_later)
    with background(make_writer(tmp_path)) as running:
        running.put(starts, 1, output(1, starts))
        running.put(starts, 2, output(2, starts))
        threading.Timer(0.2, gate.set).start()
        running.flush()
        assert len(written) == 2
    with pytest.raises(CreditError, match="not finite at 6 h"), background(make_writer(tmp_path)) as running:
        running.put(starts, 1, torch.full_like(output(1, starts), torch.nan))
        running.flush()


def test_steps_of_lagged_members_before_the_initial_time_are_skipped(tmp_path: Path) -> None:
    starts = build_starts(TIMES[:1], 2, lag_minutes=STEP)
    with background(make_writer(tmp_path, members=2)) as running:
        for step in range(1, 6):
            running.put(starts, step, output(step, starts))
    archive = open_forecasts(tmp_path)
    t2m = archive.channel_names.index("t2m")
    assert [archive.read_members(TIMES[0], n)[:, t2m, 0, 0].tolist() for n in range(3)] == [
        [1, 1002], [2, 1003], [4, 1005],
    ]  # fmt: skip


def test_number_of_waiting_steps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, writer, starts = threading.Event(), make_writer(tmp_path, lead_minutes=[STEP * n for n in range(1, 11)]), []
    held, put = [], ForecastWriter.put
    monkeypatch.setattr(ForecastWriter, "put", lambda *arguments: (gate.wait(20), put(*arguments)))
    starts = build_starts(TIMES[:1])
    running = BackgroundWriter(writer, {STEP * n: n - 1 for n in range(1, 11)}, STEP, "a model", TIMES)

    def model() -> None:
        with running:
            for step in range(1, 11):
                running.put(starts, step, output(step, starts))
                held.append(step)

    thread = threading.Thread(target=model)
    thread.start()
    thread.join(1.0)
    assert thread.is_alive() and len(held) <= 3, "one is being written, two wait"
    gate.set()
    thread.join(30)
    assert not thread.is_alive() and len(held) == 10 and writer.is_complete(TIMES[0])


def test_error_of_the_thread_reaches_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, writer = build_starts(TIMES[:1]), make_writer(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("credit.forecast.io.files.netcdf.define_variable", full)
    taken = []
    with pytest.raises(CreditError, match=r"forecast_2001-04-01T00.nc: cannot be written \(No space"):  # noqa: SIM117
        with background(writer) as running:
            for number in range(100):
                running.put(starts, 1, output(1, starts))
                taken.append(number)
    assert len(taken) < 10
    assert not list(tmp_path.iterdir())


def test_fields_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    starts = build_starts(TIMES[:1], 2)
    with pytest.raises(CreditError, match=r"a model: forecast from 2001-04-01T00:00, member 1: not finite at 12 h"):  # noqa: SIM117
        with background(make_writer(tmp_path, members=2)) as running:
            for step in range(1, 5):
                fields = output(step, starts)
                fields[1, 2, 3, 4] = np.nan if step > 1 else 0.0
                running.put(starts, step, fields)
    assert not list(tmp_path.iterdir())


def test_error_of_the_model_removes_incomplete_files(tmp_path: Path) -> None:
    starts = build_starts(TIMES[:1])
    with pytest.raises(KeyboardInterrupt), background(make_writer(tmp_path)) as running:
        running.put(starts, 1, output(1, starts))
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
