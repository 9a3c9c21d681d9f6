"""Compatibility with files of version 0.14: they resume, forecast and score with the same numbers.

`tests/data/v0_14/README.md` describes the files and how they were created.
"""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

FOLDER = Path(__file__).parent.parent / "data" / "v0_14"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())

# The numbers were computed on one type of processor. Others add float32 numbers in a different order, and ten
# training steps amplify the differences.
LOSS_TOLERANCE = 2e-4
GRADIENT_TOLERANCE = 2e-3


@pytest.fixture
def old_files(tmp_path: Path) -> Path:
    """Unpack the files of version 0.14 into the folder that `command` works in."""
    with tarfile.open(FOLDER / "files.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def metrics_rows(run_folder: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the training and validation rows of a run, by step and kind."""
    rows = {}
    for line in (run_folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for kind in ("loss", "valid"):
            if kind in row:
                rows[row["step"], kind] = row
    return rows


def assert_same_training(run_folder: Path, expected_rows: list[dict[str, Any]]) -> None:
    """Compare the rows that a continued run wrote with those that version 0.14 wrote."""
    rows = metrics_rows(run_folder)
    assert len(expected_rows) >= 4
    for expected in expected_rows:
        kind = "valid" if "valid" in expected else "loss"
        row = rows[expected["step"], kind]
        if kind == "valid":
            assert row["valid"] == pytest.approx(expected["valid"], rel=GRADIENT_TOLERANCE)
            continue
        assert row["epoch"] == expected["epoch"]
        assert row["lr"] == pytest.approx(expected["lr"], rel=1e-9)
        assert row["loss"] == pytest.approx(expected["loss"], rel=LOSS_TOLERANCE)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=GRADIENT_TOLERANCE)


# Folder of the run -> arguments of the command: the config and its overrides.
CONTINUED_RUNS = {
    "run": ["run/config.yml"],
    "sharded": ["sharded/config.yml", "trainer.parallelism.tensor=1", "trainer.max_steps=14"],
    # The base run of the adapters has been moved, so trainer.resume gives its new path.
    "tuned": ["tuned/config.yml", "trainer.max_steps=8", "trainer.resume=run/checkpoints/step_00000010"],
    "exported": ["config.yml", "save_loc=exported", "trainer.resume=export.safetensors", "trainer.max_steps=4"],
}


@pytest.mark.parametrize("run", CONTINUED_RUNS)
def test_training_continues_with_the_same_numbers(run: str, old_files: Path, command: Callable) -> None:
    """Cases: a run folder, a sharded checkpoint, a LoRA run and an export, all with the training store of 0.14."""
    result = command("train", *CONTINUED_RUNS[run])
    assert result.returncode == 0, result.stderr
    assert_same_training(old_files / run, EXPECTED["metrics"][run])


def test_forecasts_are_the_same(old_files: Path, command: Callable) -> None:
    """The checkpoint of 0.14 gives the forecasts that version 0.14 wrote."""
    old_forecasts = old_files / "old_forecasts"
    (old_files / "run" / "forecasts").rename(old_forecasts)
    result = command("rollout", "run/config.yml")
    assert result.returncode == 0, result.stderr
    paths = sorted(old_forecasts.glob("*.nc"))
    assert len(paths) == 6
    for path in paths:
        with xr.open_dataset(path) as old, xr.open_dataset(old_files / "run" / "forecasts" / path.name) as new:
            assert set(old.data_vars) <= set(new.data_vars)
            for name in ("z", "t2m", "rain"):
                spread = float(old[name].std())
                np.testing.assert_allclose(new[name].values, old[name].values, atol=1e-4 * spread, rtol=1e-5)


def test_forecasts_of_0_14_score_the_same(old_files: Path, command: Callable) -> None:
    """Forecast files and the stored climatology of 0.14 give the scores that 0.14 gave."""
    result = command("verify", "run/config.yml")
    assert result.returncode == 0, result.stderr
    keys = ("forecast", "variable", "level", "lead_hours", "metric")
    scores = {}
    with (old_files / "run" / "scores.csv").open(newline="") as table:
        for row in csv.DictReader(table):
            if row["region"] == "global" and row["season"] == "all":
                scores[tuple(row[key] for key in keys)] = row["value"]
    assert len(EXPECTED["scores"]) > 200
    for row in EXPECTED["scores"]:
        value = scores[tuple(row[key] for key in keys)]
        if row["value"] == "":
            assert value == ""
        else:
            assert float(value) == pytest.approx(float(row["value"]), rel=1e-4, abs=1e-5)
