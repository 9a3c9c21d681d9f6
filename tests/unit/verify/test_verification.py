"""Tests of the files that a verification writes: scores, figures and report."""

from __future__ import annotations

import csv
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.cli.console.score_summary import format_summary
from credit.drawing.style import format_units
from credit.errors import CreditError
from credit.verify.plots.scores import plot_skill
from credit.verify.report.metadata import describe_data, read_training_log
from credit.verify.table.table import COMMON_ATTRIBUTES, CSV_COLUMNS, ScoreTable
from credit.verify.verification import verify_forecasts
from tests.unit.verify.conftest import MODEL_ERROR, Run


@pytest.fixture(scope="module")
def table(run: Run) -> ScoreTable:
    rows = [{"step": step, "epoch": 0, "loss": 1.0 / step} for step in range(1, 61)]
    rows.insert(30, {"step": 30, "valid": {"loss": 0.05, "rmse/z500/6h": 1.0}})
    text = "\n".join(json.dumps(row) for row in rows) + '\n{"step": 61, "lo'  # cut off by a crash
    (run.folder / "metrics.jsonl").write_text(text)
    (run.folder / "figures").mkdir()
    for name in ("ranks.png", "scorecard_1.png", "maps_q700.png", "animation_z500.gif", "early_rmse.png"):
        (run.folder / "figures" / name).write_text("of another verification, or of the training")
    return verify_forecasts(run.config, run.reader, run.archive, run.folder)


def test_folder_has_all_files_and_no_others(run: Run, table: ScoreTable) -> None:
    assert {path.name for path in run.folder.iterdir()} == {
        "forecasts", "metrics.jsonl", "scores.nc", "scores.csv", "figures", "report.html",
    }  # fmt: skip
    assert {path.name for path in (run.folder / "figures").iterdir()} == {
        "skill.png", "scorecard.png", "spectra.png", "loss.png", "maps_z500.png", "maps_t2m.png", "maps_tp.png",
        "hovmoeller_z500.png", "hovmoeller_t2m.png", "hovmoeller_tp.png", "animation_t2m.gif",
        *(f"hovmoeller_latitude_{name}.png" for name in ("z500", "t2m", "tp")), "early_rmse.png",
    }  # fmt: skip


def test_scores_csv(run: Run, table: ScoreTable) -> None:
    with open(run.folder / "scores.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert {row["forecast"] for row in rows} == {"model", "persistence", "damped_persistence", "climatology"}

    def select_rows(**conditions: str) -> list[dict[str, str]]:
        return [row for row in rows if all(row[key] == value for key, value in conditions.items())]

    (row,) = select_rows(forecast="model", variable="z", region="global", season="all", lead_hours="24", metric="rmse")
    assert float(row["value"]) == pytest.approx(MODEL_ERROR, rel=1e-4)
    assert (row["level"], row["level_units"], row["units"]) == ("500", "hPa", "m2 s-2")
    assert (row["n_cases"], row["low"], row["high"], row["n_blocks"]) == ("3", "", "", "1")
    facts = {name: row[name] for name in COMMON_ATTRIBUTES}
    assert facts.pop("version").startswith("credit ") and facts == {
        "grid": "12 x 24, 15 degrees, rows from 82.5 to -82.5", "truth": "none.nc", "first_case": "2001-03-02T00:00",
        "last_case": "2001-03-07T12:00", "initial_hours": "00:00 06:00 12:00",
        "climatology": "1 annual harmonic, 2000-01-01 to 2000-12-31",
    }  # fmt: skip
    (row,) = select_rows(
        forecast="persistence", variable="t2m", region="tropics", season="all", lead_hours="6", metric="acc"
    )
    assert (row["level"], row["level_units"], row["units"]) == ("", "", "1")
    wind = {"forecast": "model", "variable": "wind", "region": "global", "season": "MAM", "lead_hours": "6"}
    (row,) = select_rows(**wind, metric="wind_vector_rmse")
    assert (row["level"], row["units"]) == ("500", "m s-1")
    (row,) = select_rows(**wind, metric="wind_vector_activity_ratio")
    assert row["units"] == "1"
    assert {row["season"] for row in rows} == {"all", "MAM"}
    assert not select_rows(forecast="climatology", metric="acc")
    assert not select_rows(lead_hours="0")
    # A grid of 12 x 24 cells resolves 8 wavenumbers.
    assert {row["event"] for row in select_rows(metric="short_wave_power")} == {"total wavenumbers 7 to 8"}
    assert {row["event"] for row in select_rows(metric="rmse")} == {""}


def test_scores_nc(run: Run, table: ScoreTable) -> None:
    with xr.open_dataset(run.folder / "scores.nc") as dataset:
        xr.testing.assert_equal(dataset.load(), table.dataset)
        assert dataset.attrs["Conventions"] == "CF-1.8"
        assert dataset["n_cases"].encoding["dtype"] == "int32"
        names = {name: dataset[name].attrs["long_name"] for name in dataset.variables}
        assert names["rmse_low"] == "lower end of the 95 % interval of the root-mean-square error (RMSE)"
        assert names["wind_vector_mae"] == "Mean absolute error, wind vectors"
        assert names["lead"] == "lead time"
        assert names["wind_n_eff"] == f"{names['n_eff']}, wind vectors"
        assert dataset["rmse"].dims == ("forecast", "season", "channel", "lead", "region")
        assert dataset["n_cases"].values.tolist() == [3, 3]
        assert dataset["n_blocks"].values.tolist() == [[1, 1, 1]] * 2
        assert dataset["p_value"].dims == ("reference", "season", "channel", "lead", "region")
        assert dataset["reference"].values.tolist() == ["best_baseline"]
        assert "rmse_low" in dataset
        assert "wind_vector_rmse_high" in dataset
        assert "wind_n_eff" in dataset
        assert set(COMMON_ATTRIBUTES) <= set(dataset.attrs)
        assert dataset.attrs["n_cases"] == 3
        assert dataset["lead"].values.tolist() == [6.0, 12.0, 24.0]


def test_report_is_one_file_with_all_facts(run: Run, table: ScoreTable) -> None:
    text = (run.folder / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert text.count("data:image/png;base64,") == 11  # The page itself draws the curves and the scorecard.
    assert text.count("data:image/gif;base64,") == 1
    for expected_text in (
        "Prescribed forcing of waves: sst", "The climatology is from 1.0 years", "1 of the forecasts were left out",
        "3 initial times", "1 annual harmonic, 2000-01-01 to 2000-12-31", "12 x 24, 15 degrees", "60 steps",
        "lowest 0.05 at step 30", "1,234,567", "experiment: waves", "none.nc", "06:00 12:00 UTC",
        "marked as significant with at least 20 blocks, so no difference is marked.", "the scores acc_wb2",
        "total wavenumbers 7 to 8,",
    ):  # fmt: skip
        assert expected_text in text, expected_text


def test_ticks_of_hours_divide_a_day_evenly(table: ScoreTable) -> None:
    assert table.lead_hours[-1] <= 48
    axis = plot_skill(table, ["t2m"]).axes[-1]
    tick_hours = [tick for tick in axis.get_xticks() if 0 <= tick <= table.lead_hours[-1]]
    assert len(tick_hours) > 3
    assert all(24 % step == 0 for step in np.diff(tick_hours))


def test_summary_for_the_terminal(table: ScoreTable) -> None:
    lines = format_summary(table).splitlines()
    assert "3 initial times" in lines[0]
    (line,) = [line for line in lines if line.startswith("z500")]
    assert line.split()[-1] == "-"  # Three cases are too few for a test of significance.
    assert lines[-3].startswith("The initial times make 1 block, each at least 5 days long")
    assert "marked as significant with at least 20 blocks" in lines[-3]
    assert lines[-2].startswith("9 of 12 lead times that inference requests")
    assert lines[-1].startswith("Prescribed forcing of waves: sst was read from the analysis")
    numbers = [float(word) for word in line.split()[5:-1]]
    assert numbers[0] == pytest.approx(MODEL_ERROR, rel=1e-3)
    assert numbers[-1] == pytest.approx(numbers[0] / min(numbers[1:4]), abs=0.01)


def test_a_folder_that_cannot_be_written_is_an_error(run: Run, table: ScoreTable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CreditError, match="cannot be written"):
        verify_forecasts(run.config, run.reader, run.archive, tmp_path / "file")


@pytest.mark.parametrize("name", ["scores.nc", "scores.csv", "report.html"])
def test_full_disk_keeps_the_files_of_the_last_verification(run: Run, table: ScoreTable, name: str) -> None:
    files_before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files are written in the order of their sizes, so the named file is the first that exceeds the limit.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(files_before[run.folder / name]) - 1, hard))
    try:
        with pytest.raises(CreditError, match=rf"{name}: cannot be written"):
            verify_forecasts(run.config, run.reader, run.archive, run.folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == files_before


def test_the_report_has_notes_of_the_source_files(shared_data: Path, run: Run) -> None:
    raw = run.config.data.model_dump()
    raw["sources"] = [{"path": str(shared_data / "speedy" / "*.nc")}]
    notes = describe_data(type(run.config.data).model_validate(raw))
    assert any("SIMULATED data, not observations" in note for note in notes)
    assert describe_data(run.config.data) == []  # The source file does not exist.


def test_a_missing_training_log_is_none(tmp_path: Path) -> None:
    assert read_training_log(tmp_path / "metrics.jsonl") is None


def test_the_training_log_has_finite_losses_only(tmp_path: Path) -> None:
    rows = '{"step": 1, "loss": 0.5}\n{"step": 1, "valid": {"loss": null}}\n{"step": 2, "loss": null}\n'
    (tmp_path / "metrics.jsonl").write_text(rows + '{"step": 2, "valid": {"loss": NaN}}\n{"step": 3, "lo')
    log = read_training_log(tmp_path / "metrics.jsonl")
    assert (log.train, log.valid) == ([(1, 0.5)], [])


@pytest.mark.parametrize(
    ("units", "power", "expected"),
    [
        ("m2 s-2", 1, "m$^{2}$ s$^{-2}$"),
        ("K", 2, "K$^{2}$"),
        ("m s-1", 2, "m$^{2}$ s$^{-2}$"),
        ("m**2 s**-2", 2, "m$^{4}$ s$^{-4}$"),
        ("kg/kg", 2, "kg$^{2}$ kg$^{-2}$"),
        ("km/h", 2, "km$^{2}$ h$^{-2}$"),
        ("1", 1, "1"),
    ],
)
def test_units_are_formatted_with_exponents(units: str, power: int, expected: str) -> None:
    assert format_units(units, power) == expected


def test_commands_do_not_import_matplotlib() -> None:
    code = "import sys, credit.verify.verification, credit.cli.verify; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
