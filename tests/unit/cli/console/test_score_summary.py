"""Summary of scores as text and as JSON document."""

from __future__ import annotations

import json

import numpy as np
import pytest

from credit.calendar import Calendar
from credit.channels import Channel
from credit.cli.console.score_summary import format_summary
from credit.verify.statistics.case_statistics import DeterministicStatistics
from credit.verify.statistics.seasons import cases_by_season
from credit.verify.table.summary import headline_channels, summary_document
from credit.verify.table.table import COMMON_ATTRIBUTES, ScoreTable
from credit.verify.table.table_builder import TableAxes, TableRows, build_table

CALENDAR = Calendar()
INITIAL = CALENDAR.parse("2001-01-01") + 1440 * np.arange(150)
LEADS = np.array([360, 1440])
NAMES = ["t850", "z500", "w500", "msl"]
SQUARED_ERRORS = {"model": 1.0, "old": 4.0, "persistence": 4.0, "damped_persistence": 4.0, "climatology": 4.0}


def make_table(names: list[str] = NAMES, experiment: str = "new run") -> ScoreTable:
    """Return scores of a model with half the error of the others. "old" has no scores of the last channel."""
    random = np.random.default_rng(1)
    channels = [Channel(name, name, None, "prognostic") for name in names]
    statistics = {}
    for name, squared_error in SQUARED_ERRORS.items():
        rows = list(range(len(names) - 1 if name == "old" else len(names)))
        shape = len(INITIAL), len(LEADS), len(rows), 1
        arrays = {key: random.gamma(50.0, squared_error / 50, shape) for key in DeterministicStatistics.array_names()}
        statistics[name] = DeterministicStatistics(INITIAL, **arrays), rows
    axes = TableAxes(TableRows(channels, [], {}), LEADS, cases_by_season(INITIAL, CALENDAR), ["global"])
    attributes = {"experiment": experiment, "n_cases": len(INITIAL), "level_units": "hPa"}
    return build_table(statistics, axes, attributes | dict.fromkeys(COMMON_ATTRIBUTES, "2001"))


def test_summary_has_headline_channels_and_number_of_others() -> None:
    table = make_table()
    assert headline_channels(table) == ["z500", "t850", "msl"]
    text = format_summary(table)
    assert "w500" not in text and "1 more channel: see --all" in text
    all_channels = format_summary(table, show_all=True)
    assert "w500" in all_channels and "--all" not in all_channels


def test_a_table_without_headline_channels_shows_its_first_channels() -> None:
    names = [f"x{number}" for number in range(9)]
    assert headline_channels(make_table(names)) == names[:6]


def test_summary_of_an_ensemble_says_that_the_mean_is_scored() -> None:
    table = make_table()
    assert format_summary(table).startswith("RMSE, global, ")
    table.dataset["members"] = ("forecast", np.array([10] + [1] * (len(table.forecasts) - 1)))
    assert "RMSE of the mean of 10 members" in " ".join(format_summary(table).split())


def test_summary_has_names_of_experiments() -> None:
    header = format_summary(make_table(), "old").splitlines()[1].split("  ")
    assert "new run" in header and "old" in header
    assert make_table(experiment="old").display_name("model") == "old (this run)"


@pytest.mark.parametrize("color", [True, False])
def test_significant_differences_are_coloured_on_request(color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if color:
        monkeypatch.setenv("FORCE_COLOR", "1")
    text = format_summary(make_table())
    assert ("\x1b[32m0.50*\x1b[0m" in text) == color
    assert ("\x1b" in text) == color and "0.50*" in text.replace("\x1b[32m", "")


def test_the_document_has_all_channels_and_null_for_missing_scores() -> None:
    table = make_table()
    files = {"report": "report.html"}
    document = json.loads(json.dumps(summary_document(table, "old", files), allow_nan=False))
    assert document["version"] == 1 and document["files"] == files
    assert document["forecasts"] == {"model": "new run", "old": "old"} and document["reference"] == "old"
    assert [row["channel"] for row in document["rows"]] == np.repeat(NAMES, len(LEADS)).tolist()
    first_row = document["rows"][0]
    assert first_row["rmse"]["model"] == pytest.approx(table.score("model", "t850", 6))
    assert first_row["ratio"] == pytest.approx(0.5, rel=0.05) and first_row["significant"] is True
    last_row = document["rows"][-1]
    assert last_row["rmse"]["old"] is None and last_row["ratio"] is None and last_row["significant"] is False
