"""Report of ``credit check``: groups of messages, counts, ``--json`` and ``--quiet``."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from credit.cli import main
from credit.cli.check.report import CheckReport, group_messages
from tests.unit.cli.world import hours_of_file
from tests.unit.data.files_on_the_fly import random_fields, write_file


def test_messages_that_differ_only_in_the_file_are_grouped() -> None:
    messages = [f"data/t_{year}.nc: no variable t; check data.variables" for year in range(2000, 2012)]
    groups = group_messages([*messages[:6], "save_loc: run cannot be written", *messages[6:]])
    assert [len(group.files) for group in groups] == [12, 0]
    assert groups[0].describe() == (
        "12 files: no variable t; check data.variables\n  data/t_2000.nc, data/t_2001.nc, data/t_2002.nc and 9 more"
    )
    assert groups[1].describe() == "save_loc: run cannot be written"


def test_messages_with_file_in_the_middle_are_grouped() -> None:
    groups = group_messages([f"data.sources.0: {name}.grib2: is truncated" for name in "ab"])
    assert [group.describe() for group in groups] == ["2 files: data.sources.0: FILE: is truncated\n  a.grib2, b.grib2"]


def test_different_messages_and_pairs_of_files_are_not_grouped() -> None:
    messages = ["a.nc: no t", "b.nc: no q", "a.nc and b.nc differ", "c.nc and d.nc differ", "data.levels.nc5 is wrong"]
    assert [group.describe() for group in group_messages(messages)] == messages


def test_counts_are_the_last_line() -> None:
    report = CheckReport()
    for message in ("a.nc: bad", "b.nc: bad", "save_loc: bad"):
        report.add(message)
    assert report.format().splitlines()[-1] == "3 errors, 0 warnings"
    report.add_warning("the run failed before")
    assert report.format().splitlines()[-2:] == ["WARNING: the run failed before", "3 errors, 1 warning"]
    assert report.exit_status == 2


def test_warnings_alone_give_exit_status_0() -> None:
    report = CheckReport()
    with report.collect_logged_warnings():
        logging.getLogger("credit.data").warning("%s is not used", "x.nc")
    assert report.warnings == ["x.nc is not used"]
    assert report.format() == "WARNING: x.nc is not used\n0 errors, 1 warning"
    assert report.exit_status == 0
    assert logging.getLogger("credit").propagate


def test_json_prints_only_the_document(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(world / "data_other.nc", {"T2M": random_fields(20, 16, 32)}, hours_of_file(1))
    arguments = ["config.yml", "trainer.walltime=1min", "trainer.monitor=rmse/z500/6h", "loss.weights={z: 1}"]
    assert main._run_command("check", [*arguments, "--json"], "credit check") == 2
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"errors", "warnings", "notes", "num_errors", "num_warnings"}
    assert document["num_errors"] == len(document["errors"]) >= 2
    assert any("rmse/z500/6h" in error["message"] for error in document["errors"])
    assert document["num_warnings"] == 1 and "data_other.nc is not used" in document["warnings"][0]["message"]
    assert any(note.startswith("data.splits.train") for note in document["notes"])


def test_quiet_prints_problems_only(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main._run_command("check", ["config.yml", "--quiet"], "credit check") == 0
    assert capsys.readouterr().out == ""
    assert main._run_command("check", ["config.yml", "--quiet", "trainer.resume=/nowhere"], "credit check") == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ERROR: ") and lines[-1] == "1 error, 0 warnings"
