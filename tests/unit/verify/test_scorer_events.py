"""Tests of the scores of events and SEEPS, against the library `scores` and a climate that is computed here."""

from __future__ import annotations

import csv
import operator
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config import Config, build_config
from credit.config.sections.verification import VerificationConfig
from credit.errors import ConfigError
from credit.forecast.io.forecast_reader import ForecastArchive, open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.schema import OutputFields
from credit.verify import scorer
from credit.verify.partial_scores import PartialScores, WorkShare
from credit.verify.scorer import score_forecasts
from credit.verify.scores.event_scorer import EventScorer
from credit.verify.scores.seeps import DRY_BELOW_MM, SeepsStatistics
from credit.verify.table.table import SHORT_WAVES, ScoreTable
from tests.unit.analytic_reader import AnalyticReader, make_grid
from tests.unit.verify.conftest import make_config

DAY = 1440
LEADS, MEMBERS = [DAY, 3 * DAY], 4
VARIABLES = {"prognostic": {"vars_3D": [], "vars_2D": ["t2m", "sst"]}, "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]}}
EVENTS = {
    "warm": {"channel": "t2m", "above": 278.0},
    "hot_sea": {"channel": "sst", "above_quantile": 0.8},
    "cold": {"channel": "t2m", "below_quantile": 0.25},
    "heavy_rain": {"channel": "tp", "above": 6.0},
}
INITIAL = [f"2001-03-0{day}" for day in (1, 2, 4, 5)]
CALENDAR, GRID = Calendar(), make_grid(8, 16)
AREA = xr.DataArray(GRID.area_weights(), dims=("lat", "lon"))
MASK = np.random.default_rng(0).random(GRID.shape) < 0.3


def draw_weather(minutes: int, channel: int, seed: int = 0) -> np.ndarray:
    """Return the temperature of a day, which rises from January to July, or its rain in mm."""
    rng = np.random.default_rng([minutes // DAY, channel, seed])
    if channel == 2:
        return np.maximum(rng.gamma(0.8, 6.0, GRID.shape) - 2.0, 0.0)
    return 280 - 4 * np.cos(2 * np.pi * CALENDAR.year_fraction(np.array(minutes))) + rng.standard_normal(GRID.shape) * 3


def make_reader(first: str = "2000-01-01") -> AnalyticReader:
    channels = ChannelMap.build(VARIABLES, [], masked_variables=["sst"])
    times = np.arange(CALENDAR.parse(first), CALENDAR.parse("2001-03-11"), DAY)
    return AnalyticReader(channels, GRID, CALENDAR, times, draw_weather, {"sst": MASK})


def build_test_config(folder: Path, **verification: object) -> Config:
    raw = make_config(folder, figure_leads=["24h"], **verification).model_dump()
    raw["data"] |= {"variables": VARIABLES, "timestep": "24h", "levels": []}
    return build_config(raw)


def build_member(truth: np.ndarray, initial: int, lead: int, member: int) -> np.ndarray:
    """Return the mean of the truth and of other random weather on the same day."""
    other = np.stack([draw_weather(initial + lead, channel, seed=member + 1) for channel in range(3)])
    return np.float32(0.5) * (truth + other.astype(np.float32))


@dataclass(frozen=True)
class ScoredForecasts:
    """Table and fields of a verification: truth (case, lead, channel, lat, lon), members (case, lead, member, ...)."""

    table: ScoreTable
    folder: Path
    archive: ForecastArchive
    truth: xr.DataArray
    members: xr.DataArray


@pytest.fixture(scope="module")
def scored_forecasts(tmp_path_factory: pytest.TempPathFactory) -> ScoredForecasts:
    folder = tmp_path_factory.mktemp("events")
    reader = make_reader()
    starts = [CALENDAR.parse(text) for text in INITIAL]
    fields = OutputFields(reader.channels, GRID, CALENDAR, reader.attributes, DAY, masks=reader.masks)
    writer = ForecastWriter(folder / "forecasts", fields, LEADS, starts, members=MEMBERS)
    truth = np.empty((len(starts), len(LEADS), 3, *GRID.shape), dtype=np.float32)
    members = np.empty((len(starts), len(LEADS), MEMBERS, 3, *GRID.shape), dtype=np.float32)
    for case, start in enumerate(starts):
        for number, lead in enumerate(LEADS):
            truth[case, number] = reader.read(reader.index_of(start + lead))
            for member in range(MEMBERS):
                members[case, number, member] = build_member(truth[case, number], start, lead, member)
                writer.put(start, number, members[case, number, member], member)
    writer.close()
    archive = open_forecasts(folder / "forecasts")
    table = score_forecasts(build_test_config(folder, events=EVENTS), reader, archive).table
    table.write(folder)
    dims = ("case", "lead", "channel", "lat", "lon")
    names = {"channel": [c.name for c in reader.channels.output]}
    assert names["channel"] == ["t2m", "sst", "tp"]
    labelled = xr.DataArray(truth, names, dims)
    return ScoredForecasts(
        table, folder, archive, labelled, xr.DataArray(members, names, (*dims[:2], "member", *dims[2:]))
    )


@pytest.fixture(scope="module")
def climate() -> xr.DataArray:
    """Fields of the year 2000 for each valid time, (case, lead, time, ...).

    Times more than 30 days from the centre of the five days that contain the valid time are NaN.
    """
    reader = make_reader()
    year = np.stack([reader.read(day) for day in range(366)])
    days = np.arange(366) * 365 / 366
    climate_fields = np.full((len(INITIAL), len(LEADS), *year.shape), np.nan, dtype=np.float32)
    for case, text in enumerate(INITIAL):
        for number, lead in enumerate(LEADS):
            day = CALENDAR.datetime(CALENDAR.parse(text) + lead).dayofyr - 1
            is_in_season = np.abs(days - (day // 5 * 5 + 2.5)) <= 30
            climate_fields[case, number, is_in_season] = year[is_in_season]
    names = {"channel": [c.name for c in reader.channels.output]}
    return xr.DataArray(climate_fields, names, ("case", "lead", "time", "channel", "lat", "lon"))


def compute_expected_brier(
    scored_forecasts: ScoredForecasts, climate: xr.DataArray, name: str
) -> dict[str, np.ndarray]:
    """Return metric -> global scores (lead,), computed with the library."""
    scores = pytest.importorskip("scores")
    event = EVENTS[name]
    fields = [
        field.sel(channel=event["channel"]).astype(np.float64)
        for field in (scored_forecasts.members, scored_forecasts.truth, climate)
    ]
    sign = -1 if "below_quantile" in event else 1
    quantile = event.get("above_quantile", event.get("below_quantile"))
    if quantile is None:
        threshold = event["above"]
    else:
        with warnings.catch_warnings(action="ignore"):  # Masked cells have only NaN.
            threshold = fields[2].quantile(quantile, "time").drop_vars("quantile")
    members, truth, normal = (sign * (field - threshold) for field in fields)
    has_climate = normal.notnull().any(("lat", "lon"))  # days of the season; masked cells of sst are NaN on all days
    arguments = {"event_threshold_operator": operator.gt, "preserve_dims": "all"}
    brier, fair = (
        scores.probability.brier_score_for_ensemble(
            members, truth, "member", 0.0, fair_correction=correction, **arguments
        ).isel(threshold=0, drop=True)
        for correction in (False, True)
    )
    probability = (normal > 0).sum("time") / has_climate.sum("time")
    reference = ((probability - (truth > 0)) ** 2).where(truth.notnull())
    brier, fair, reference = (score.weighted(AREA).mean(["case", "lat", "lon"]) for score in (brier, fair, reference))
    return {
        "brier": brier, "brier_fair": fair, "brier_skill": 1 - brier / reference,
        "brier_skill_fair": 1 - fair / reference, "climatology": reference,
    }  # fmt: skip


@pytest.mark.parametrize("name", list(EVENTS))
def test_brier_scores_equal_those_of_the_library(
    scored_forecasts: ScoredForecasts, climate: xr.DataArray, name: str
) -> None:
    expected = compute_expected_brier(scored_forecasts, climate, name)
    table = scored_forecasts.table
    scores = {
        metric: table.scores_by_lead("model", "t2m", f"{metric}:{name}")
        for metric in expected
        if metric != "climatology"
    }
    scores["climatology"] = table.scores_by_lead("climatology", "t2m", f"brier:{name}")
    for metric, values in expected.items():
        np.testing.assert_allclose(scores[metric], values, rtol=1e-6, atol=1e-9, err_msg=metric)
    assert scores["brier"].min() > 0.01
    assert (table.scores_by_lead("climatology", "t2m", f"brier_skill:{name}") == 0).all()
    parts = [
        table.scores_by_lead("model", "t2m", f"{part}:{name}") for part in ("reliability", "resolution", "uncertainty")
    ]
    np.testing.assert_allclose(parts[0] - parts[1] + parts[2], scores["brier"], rtol=1e-12)


def test_quantiles_are_those_of_the_season(scored_forecasts: ScoredForecasts) -> None:
    """About 18 % of the cells exceed the quantile of the season, and less than 6 % that of the whole year."""
    uncertainty = scored_forecasts.table.scores_by_lead("model", "sst", "uncertainty:hot_sea")
    np.testing.assert_allclose(uncertainty, 0.18 * 0.82, atol=0.04)
    year = make_reader()
    year_values = np.stack([year.read(day)[1][~MASK] for day in range(366)])
    is_hot_for_the_year = scored_forecasts.truth.sel(channel="sst").values[..., ~MASK] > np.quantile(
        year_values, 0.8, axis=0
    )
    assert is_hot_for_the_year.mean() < 0.06


def test_seeps_equals_that_of_the_library(scored_forecasts: ScoredForecasts, climate: xr.DataArray) -> None:
    scores = pytest.importorskip("scores")
    rain = climate.sel(channel="tp").astype(np.float64)
    dry = (rain < DRY_BELOW_MM).sum("time") / rain.notnull().sum("time")
    heavy = rain.where(rain >= DRY_BELOW_MM).quantile(2 / 3, "time").drop_vars("quantile")
    members, truth = (
        field.sel(channel="tp").astype(np.float64) for field in (scored_forecasts.members, scored_forecasts.truth)
    )
    penalties = scores.categorical.seeps(
        members, truth, dry, heavy, dry_light_threshold=np.nextafter(DRY_BELOW_MM, 0), preserve_dims="all"
    )
    expected = penalties.mean("member").weighted(AREA).mean(["case", "lat", "lon"])
    table = scored_forecasts.table
    np.testing.assert_allclose(table.scores_by_lead("model", "tp", "seeps"), expected, rtol=1e-6)
    assert np.isnan(table.scores_by_lead("model", "t2m", "seeps")).all()
    # The climatological mean is a constant forecast of light rain.
    np.testing.assert_allclose(table.scores_by_lead("climatology", "tp", "seeps"), 1.0, atol=0.15)


def test_files_have_the_scores_of_events(scored_forecasts: ScoredForecasts) -> None:
    with open(scored_forecasts.folder / "scores.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    conditions = {"metric": "brier:heavy_rain", "region": "global", "season": "all", "lead_hours": "24"}
    rows_by_forecast = {row["forecast"]: row for row in rows if conditions.items() <= row.items()}
    assert set(rows_by_forecast) == {"model", "persistence", "damped_persistence", "climatology"}
    row = rows_by_forecast["model"]
    assert (row["variable"], row["units"], row["event"]) == ("tp", "1", "tp above 6 mm")
    assert {row["event"] for row in rows if ":" not in row["metric"] and row["metric"] != SHORT_WAVES} == {""}
    (seeps,) = (row for row in rows if {**conditions, "metric": "seeps", "forecast": "model"}.items() <= row.items())
    assert (seeps["variable"], seeps["units"]) == ("tp", "1")
    with xr.open_dataset(scored_forecasts.folder / "scores.nc") as dataset:
        assert dataset["brier"].dims == ("forecast", "season", "event", "lead", "region")
        assert "at least 60 times of the training period" in dataset.attrs["climate_of_events"]
        shares = dataset["forecast_frequency"].sel(forecast="model", region="global")
        np.testing.assert_allclose(shares.sum("members_beyond"), 1.0)
        scores = dataset.sel(forecast="model", region="global", season="all", event="cold")
        p = np.arange(MEMBERS + 1) / MEMBERS
        forecast = scores["forecast_frequency"]
        observed = scores["observed_frequency"].fillna(0)
        brier = (forecast * (observed * (1 - p) ** 2 + (1 - observed) * p**2)).sum("members_beyond")
        np.testing.assert_allclose(brier, scores["brier"])


def test_two_shares_join_to_all_cases_to_the_last_bit(
    scored_forecasts: ScoredForecasts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score_share(share: WorkShare) -> PartialScores:
        partial_scores = []
        monkeypatch.setattr(scorer, "score_and_gather", lambda score, is_sharded: partial_scores.append(score()))
        score_forecasts(
            build_test_config(scored_forecasts.folder, events=EVENTS), make_reader(), scored_forecasts.archive, share
        )
        return partial_scores[0]

    all_cases = score_share(WorkShare())
    joined = PartialScores.join([score_share(WorkShare(1, 2)), score_share(WorkShare(0, 2))])
    forecast_names = {"model", "persistence", "damped_persistence"}
    for sums, joined_statistics, keys in (
        (all_cases.events, joined.events, forecast_names),
        (all_cases.seeps, joined.seeps, forecast_names | {"climatology"}),
    ):
        assert set(sums) == set(joined_statistics) == keys
        for forecast, values in sums.items():
            for name, plane in values.arrays().items():
                np.testing.assert_array_equal(getattr(joined_statistics[forecast], name), plane)


def test_scorer_without_events_has_no_climate() -> None:
    reader = make_reader()
    scorer_without_events = EventScorer(VerificationConfig(), reader, [], None, None, None, None)
    assert scorer_without_events.attributes() == {}
    scorer_without_events.warn_of_missing_seeps(SeepsStatistics.empty(np.array([0]), 1, 0, 1, 1))


def test_data_without_the_training_period_have_no_climate(
    scored_forecasts: ScoredForecasts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Data begin in December 2000. An event with a fixed limit is scored, but its skill is unknown."""
    reader = make_reader("2000-12-20")
    with pytest.raises(ConfigError, match="events.cold.below_quantile: 0.25 is a quantile.* 0 times within 30 days"):
        score_forecasts(build_test_config(tmp_path, events={"cold": EVENTS["cold"]}), reader, scored_forecasts.archive)
    config = build_test_config(tmp_path, events={"warm": EVENTS["warm"]}, climatology={"harmonics": 0})
    table = score_forecasts(config, reader, scored_forecasts.archive).table
    np.testing.assert_array_equal(
        table.scores_by_lead("model", "t2m", "brier:warm"),
        scored_forecasts.table.scores_by_lead("model", "t2m", "brier:warm"),
    )
    assert np.isnan(table.scores_by_lead("model", "t2m", "brier_skill:warm")).all()
    assert "seeps" not in table.dataset
    assert "Brier skill and SEEPS are not computed" in caplog.text
    assert "is dry" not in caplog.text


def test_a_dry_climate_has_no_seeps(
    scored_forecasts: ScoredForecasts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader()
    dry_reader = AnalyticReader(
        reader.channels,
        GRID,
        CALENDAR,
        reader.times,
        lambda t, c: draw_weather(t, c) * (0.01 if c == 2 else 1),
        reader.masks,
    )
    table = score_forecasts(build_test_config(tmp_path), dry_reader, scored_forecasts.archive).table
    assert "seeps" not in table.dataset
    assert "brier" not in table.dataset
    assert "tp: SEEPS is not computed, because no cell is dry" in caplog.text
