"""Tests of the check of sampled values before a run: one time of each file, and the limit of bad times."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from credit.cli.check.data import inspect_data
from credit.cli.check.report import CheckReport
from credit.config.sections.data import DataConfig
from credit.data.sources import value_check
from credit.data.sources.source_reader import open_sources
from credit.data.sources.value_check import check_sampled_values
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W = 8, 16
NUM_TIMES = 40


@pytest.fixture(autouse=True)
def _limit_checked_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the check to 8 times, as happens with large fields."""
    monkeypatch.setattr(value_check, "_CHECKED_BYTES", 1)


def test_one_time_of_each_file_is_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of 20 files has values in Celsius with the units K."""
    fields = random_fields(NUM_TIMES, H, W)
    for number in range(20):
        values = fields[2 * number :][:2] - (273.15 if number == 7 else 0.0)
        write_file(tmp_path / f"{number:02d}.nc", {"t2m": values}, 12 * number + np.array([0, 6]))
    reader = open_sources(make_config(tmp_path / "*.nc", p2=["t2m"]))
    with caplog.at_level(logging.INFO):
        result = check_sampled_values(reader, int(reader.times[0]), int(reader.times[-1]))
    assert (result.num_checked, result.num_times) == (20, NUM_TIMES)
    assert len(result.problems) == 1
    assert "07.nc: t2m" in result.problems[0]
    assert "checking the values of 20 of 40 times, 20 of them to read each file" in caplog.text


def write_bad_times(folder: Path, bad_indices: list[int]) -> DataConfig:
    """Write a file with an undeclared fill value at some times, and return its config."""
    values = random_fields(NUM_TIMES, H, W)
    values[bad_indices, 2, 3] = -999.0
    path = write_file(folder / "a.nc", {"t2m": values}, np.arange(NUM_TIMES) * 6)
    return make_config(path, p2=["t2m"], store=str(folder / "store.zarr"), on_bad_time="skip")


def test_one_bad_time_of_eight_is_accepted(tmp_path: Path) -> None:
    lines: list[str] = []
    check_report = CheckReport(lines.append)
    inspect_data(write_bad_times(tmp_path, [0]), check_report)
    assert check_report.messages == []
    report = "\n".join(lines)
    assert " 8 of " in report
    assert "at least one of each file; preprocessing checks all" in report
    assert "training look" not in report
    assert "values: 1 of these times are bad and will be left out" in report


def test_eight_bad_times_of_eight_are_a_problem(tmp_path: Path) -> None:
    check_report = CheckReport(lambda line: None)
    inspect_data(write_bad_times(tmp_path, list(range(NUM_TIMES))), check_report)
    assert len(check_report.messages) == 1
    assert "8 of these times are bad" in check_report.messages[0]
