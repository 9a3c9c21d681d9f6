"""Several runs that write netCDF files of the same forecasts into one folder concurrently."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from credit.calendar import Calendar
from tests.unit.forecast.test_forecast_writer import INITIAL, make_writer, random_fields

FIRST = Calendar().parse(INITIAL[0])


@contextmanager
def act_as_other_process() -> Iterator[None]:
    """Give writers that begin a forecast inside this context the process id of another process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.getpid", lambda: 10**7)
        yield


@pytest.mark.parametrize("compression", [0, 1])
def test_writing_keeps_the_temporary_file_recent(tmp_path: Path, compression: int) -> None:
    writer = make_writer(tmp_path, compression=compression)
    for number, fields in enumerate(random_fields()[:-1]):
        writer.put(FIRST, number, fields)
        (temporary_file,) = tmp_path.glob("*.part.*")
        assert temporary_file.stat().st_mtime > 1, number
        os.utime(temporary_file, (0, 0))


@pytest.mark.parametrize("split", [None, "lead"])
def test_two_runs_write_the_same_forecast_concurrently(tmp_path: Path, split: str | None) -> None:
    fields = random_fields()
    first, second = (make_writer(tmp_path / "both", split=split) for _ in range(2))
    first.put(FIRST, 0, fields[0])
    with act_as_other_process():
        second.put(FIRST, 0, fields[0])
    for writer in (first, second):
        for number in range(1, len(fields)):
            writer.put(FIRST, number, fields[number])
        assert writer.is_complete(FIRST)
    make_writer(tmp_path / "alone", split=split).write(FIRST, fields)
    concurrent_files, single_run_files = (
        {path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("both", "alone")
    )
    assert concurrent_files == single_run_files


@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed by an error"])
@pytest.mark.parametrize(("begins", "ends"), [(1, 2), (1, 3), (2, 3), (3, 3)])
def test_failure_of_the_second_run_keeps_files_of_the_first(
    tmp_path: Path, begins: int, ends: int, closed: bool
) -> None:
    """The first run has put `begins` lead times when the second begins, and `ends` lead times when it ends."""
    fields = random_fields()
    first, second = (make_writer(tmp_path, split="lead") for _ in range(2))
    for number, field in enumerate(fields):
        first.put(FIRST, number, field)
        if number + 1 == begins:
            with act_as_other_process():
                second.put(FIRST, 0, fields[0])
        if number + 1 == ends and closed:
            second.close()
    assert first.is_complete(FIRST)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"forecast_2001-04-01T00_{lead}.nc" for lead in ("006h", "012h", "024h")
    ]


def test_failure_of_the_first_run_keeps_files_of_the_second(tmp_path: Path) -> None:
    fields = random_fields()
    first, second = (make_writer(tmp_path, split="lead") for _ in range(2))
    first.put(FIRST, 0, fields[0])
    first.put(FIRST, 1, fields[1])
    with act_as_other_process():
        second.put(FIRST, 0, fields[0])
    first.close()
    assert [path.name for path in tmp_path.iterdir()] == ["forecast_2001-04-01T00_006h.nc"]
    for number in (1, 2):
        second.put(FIRST, number, fields[number])
    assert second.is_complete(FIRST)
