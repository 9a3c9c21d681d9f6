"""Runs that write netCDF files of the same forecasts into one folder at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from credit.times import Clock
from tests.unit.forecast.test_writer import INITIAL, _fields, _writer

FIRST = Clock().parse(INITIAL[0])


@pytest.mark.parametrize("compression", [0, 1])
def test_a_file_that_is_being_written_never_looks_left(tmp_path: Path, compression: int) -> None:
    writer = _writer(tmp_path, compression=compression)
    for number, fields in enumerate(_fields()[:-1]):
        writer.put(FIRST, number, fields)
        (part,) = tmp_path.glob("*.part.*")
        assert part.stat().st_mtime > 1, number
        os.utime(part, (0, 0))


@pytest.mark.parametrize("split", [None, "lead"])
def test_two_runs_that_make_the_same_forecast_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str | None
) -> None:
    fields = _fields()
    own, other = (_writer(tmp_path / "both", split=split) for _ in range(2))
    own.put(FIRST, 0, fields[0])
    with monkeypatch.context() as patched:
        patched.setattr("os.getpid", lambda: 10**7)
        other.put(FIRST, 0, fields[0])
    for writer in (own, other):
        for number in range(1, len(fields)):
            writer.put(FIRST, number, fields[number])
        assert writer.is_complete(FIRST)
    _writer(tmp_path / "alone", split=split).write(FIRST, fields)
    both, alone = ({path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("both", "alone"))
    assert both == alone
