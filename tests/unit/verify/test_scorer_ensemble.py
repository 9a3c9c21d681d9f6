"""Tests of the verification of an ensemble whose members have known errors."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.cli.console.score_summary import format_summary
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.schema import OutputFields
from credit.verify.report.metadata import describe_forecasts
from credit.verify.table.table import ScoreTable
from credit.verify.verification import verify_forecasts
from tests.unit.verify.conftest import LEADS, STEP, Run, make_config, make_reader

# Members are the truth plus these errors: mean 1, variance 4, so spread/skill = sqrt(4/3 * 4 / 1).
MEMBER_ERRORS = np.array([-1.0, 1.0, 3.0])
INITIAL = ["2001-03-02T00:00", "2001-03-04T06:00", "2001-03-07T12:00"]


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory, run: Run) -> tuple[ScoreTable, Path]:
    """Verify an ensemble as the model, and the single forecasts of `run` as another forecast."""
    folder = tmp_path_factory.mktemp("ensemble")
    reader = make_reader()
    starts = [reader.calendar.parse(text) for text in INITIAL]
    attributes = {"forcing": "sst: persist", "ensemble": "3 members; made up", "weights": "0a1b2c3d"}
    fields = OutputFields(reader.channels, reader.grid, reader.calendar, reader.attributes, STEP, masks=reader.masks)
    writer = ForecastWriter(
        folder / "forecasts", fields, LEADS, starts, members=len(MEMBER_ERRORS), global_attributes=attributes
    )
    outputs = len(reader.channels.output)
    for start in starts:
        for number, lead in enumerate(LEADS):
            truth = reader.read(reader.index_of(start + lead))[:outputs]
            for member, error in enumerate(MEMBER_ERRORS):
                writer.put(start, number, truth + np.float32(error), member)
    writer.close()
    events = {"warm": {"channel": "t2m", "above": 290.0}, "high": {"channel": "z500", "above_quantile": 0.9}}
    config = make_config(folder, other_forecasts={"single": str(run.folder / "forecasts")}, events=events)
    return verify_forecasts(config, reader, open_forecasts(folder / "forecasts"), folder), folder


def test_scores_of_members(ensemble: tuple[ScoreTable, Path]) -> None:
    table, _ = ensemble
    expected = {
        "rmse": 1.0, "bias": 1.0, "mae": 1.0, "spread": 2.0, "spread_skill": np.sqrt(4 / 3 * 4),
        "rmse_member": np.sqrt(11 / 3), "crps": 5 / 3 - 8 / 9, "crps_fair": 5 / 3 - 8 / 6,
        "rank_outliers": 0.0, "rank_deviation": 1.5,
    }  # fmt: skip
    for name, value in expected.items():
        for region in ("global", "tropics"):
            scores = [table.score("model", channel, 12, name, region) for channel in table.channels]
            np.testing.assert_allclose(scores, value, rtol=1e-4, atol=1e-6, err_msg=name)
    ranks = table.dataset["ranks"].sel(forecast="model", region="global", lead=6.0)
    np.testing.assert_allclose(ranks, np.broadcast_to([0, 1, 0, 0], ranks.shape), atol=1e-12)


def test_members_and_forcing_of_each_forecast_are_written(ensemble: tuple[ScoreTable, Path]) -> None:
    table, folder = ensemble
    with open(folder / "scores.csv", newline="") as handle:
        csv_facts = {(row["forecast"], row["members"], row["prescribed_forcing"]) for row in csv.DictReader(handle)}
    baselines = {(name, "1", "none") for name in ("persistence", "damped_persistence", "climatology")}
    assert csv_facts == {("model", "3", "none"), ("single", "1", "sst")} | baselines
    with xr.open_dataset(folder / "scores.nc") as scores:
        assert scores["members"].sel(forecast=["model", "single"]).values.tolist() == [3, 1]
        assert scores["forcing"].sel(forecast="single") == "sst: observed; sin_year: computed"
        assert scores["ensemble"].sel(forecast="model") == "3 members; made up"
        assert scores["weights"].sel(forecast="model") == "0a1b2c3d"
    lead_warning, forcing_warning, members_warning = table.warnings()
    assert lead_warning.startswith("9 of 12 lead times that inference requests")
    assert forcing_warning.startswith("Prescribed forcing of single: sst was read from the analysis")
    assert members_warning.startswith("Unequal numbers of members: waves 3, single 1.")
    assert format_summary(table, "single").endswith(f"{forcing_warning}\n{members_warning}")
    page = (folder / "report.html").read_text()
    facts = "<th>Members of single</th><td>1</td>", "<td>3 members; made up</td>", "0a1b2c3d"
    for words in (lead_warning, forcing_warning, members_warning, *facts):
        assert words in page, words


def test_facts_missing_in_files_of_another_program_are_unknown() -> None:
    attributes = describe_forecasts({"ifs": 1, "climatology": 1}, {"ifs": {"source": "elsewhere"}})
    assert attributes["forcing"] == attributes["prescribed_forcing"] == ["unknown", "none"]


def test_crps_of_a_single_forecast_is_its_absolute_error(ensemble: tuple[ScoreTable, Path]) -> None:
    table, _ = ensemble
    for name in ("single", "persistence", "climatology"):
        assert table.score(name, "z500", 24, "crps") == table.score(name, "z500", 24, "mae")
        assert np.isnan(table.score(name, "z500", 24, "crps_fair"))
        assert np.isnan(table.score(name, "z500", 24, "spread"))


def test_wind_has_the_energy_score(ensemble: tuple[ScoreTable, Path]) -> None:
    """Both components have the same errors, so the length of a vector is sqrt(2) times the scalar."""
    table, folder = ensemble
    with open(folder / "scores.csv", newline="") as handle:
        rows = [row for row in csv.DictReader(handle) if row["variable"] == "wind" and row["forecast"] == "model"]
    by_metric = {row["metric"]: row for row in rows if row["region"] == "global" and row["lead_hours"] == "6"}
    assert float(by_metric["wind_energy_score"]["value"]) == pytest.approx(np.sqrt(2) * (5 / 3 - 8 / 9), rel=1e-4)
    assert by_metric["wind_energy_score"]["units"] == "m s-1"
    assert by_metric["wind_vector_spread_skill"]["units"] == "1"


def test_figures_and_maps_show_the_spread(ensemble: tuple[ScoreTable, Path]) -> None:
    _, folder = ensemble
    names = {path.name for path in (folder / "figures").iterdir()}
    assert {"spread.png", "ranks.png", "reliability.png"} <= names
    drawn_by_the_page = {"skill.png", "spread.png", "scorecard.png", "scorecard_1.png"}
    assert drawn_by_the_page <= names
    text = (folder / "report.html").read_text()
    assert text.count("data:image/png;base64,") == len(names - drawn_by_the_page)
    event = "z500 above quantile 0.9 of its season"
    for words in (event, "Brier score: high", "Brier skill score: warm", "Reliability diagram"):
        assert words in text, words


def test_events_of_members_and_of_a_single_forecast(ensemble: tuple[ScoreTable, Path]) -> None:
    """A forecast is wrong in cells whose distance from 290 is less than its error, which is 3 for the single one."""
    table, _ = ensemble
    reader = make_reader()
    area = make_reader().grid.area_weights()
    number = [channel.name for channel in reader.channels.time_varying_stored].index("t2m")
    members = []
    single = []
    for text in INITIAL:
        truth = reader.read(reader.index_of(reader.calendar.parse(text) + 720))[number]
        share = np.mean([truth + np.float32(error) > 290 for error in MEMBER_ERRORS], axis=0)
        members.append((area * (share - (truth > 290)) ** 2).sum())
        single.append((area * ((truth + np.float32(3) > 290) != (truth > 290))).sum())
    assert table.score("model", "t2m", 12, "brier:warm") == pytest.approx(np.mean(members), rel=1e-6)
    assert table.score("single", "t2m", 12, "brier:warm") == pytest.approx(np.mean(single), rel=1e-6)
    assert np.isnan(table.score("single", "t2m", 12, "brier_fair:warm"))
    assert np.isfinite(table.dataset["forecast_frequency"].sel(forecast="single")).sum("members_beyond").max() == 2
