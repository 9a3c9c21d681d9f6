"""Events and SEEPS through the whole scoring, against the library `scores` and a climate that is taken apart here."""

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


def weather(minutes: int, channel: int, seed: int = 0) -> np.ndarray:
    """Return one day's temperature, warmer from January to July, or its rain in mm."""
    rng = np.random.default_rng([minutes // DAY, channel, seed])
    if channel == 2:
        return np.maximum(rng.gamma(0.8, 6.0, GRID.shape) - 2.0, 0.0)
    return 280 - 4 * np.cos(2 * np.pi * CALENDAR.year_fraction(np.array(minutes))) + rng.standard_normal(GRID.shape) * 3


def make_reader(first: str = "2000-01-01") -> AnalyticReader:
    channels = ChannelMap.build(VARIABLES, [], masked_variables=["sst"])
    times = np.arange(CALENDAR.parse(first), CALENDAR.parse("2001-03-11"), DAY)
    return AnalyticReader(channels, GRID, CALENDAR, times, weather, {"sst": MASK})


def config_of(folder: Path, **verification: object) -> Config:
    raw = make_config(folder, figure_leads=["24h"], **verification).model_dump()
    raw["data"] |= {"variables": VARIABLES, "timestep": "24h", "levels": []}
    return build_config(raw)


def forecast_of(truth: np.ndarray, initial: int, lead: int, member: int) -> np.ndarray:
    """Return half the truth and half other days."""
    other = np.stack([weather(initial + lead, channel, seed=member + 1) for channel in range(3)])
    return np.float32(0.5) * (truth + other.astype(np.float32))


@dataclass(frozen=True)
class Scored:
    """What was verified, and its fields: truth (case, lead, channel, lat, lon) and members likewise."""

    table: ScoreTable
    folder: Path
    archive: ForecastArchive
    truth: xr.DataArray
    members: xr.DataArray


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Scored:
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
                members[case, number, member] = forecast_of(truth[case, number], start, lead, member)
                writer.put(start, number, members[case, number, member], member)
    writer.close()
    archive = open_forecasts(folder / "forecasts")
    table = score_forecasts(config_of(folder, events=EVENTS), reader, archive).table
    table.write(folder)
    dims = ("case", "lead", "channel", "lat", "lon")
    names = {"channel": [c.name for c in reader.channels.output]}
    assert names["channel"] == ["t2m", "sst", "tp"]
    labelled = xr.DataArray(truth, names, dims)
    return Scored(table, folder, archive, labelled, xr.DataArray(members, names, (*dims[:2], "member", *dims[2:])))


@pytest.fixture(scope="module")
def climate() -> xr.DataArray:
    """The year 2000 around each valid time, (case, lead, time, ...), NaN more than 30 days from its five days."""
    reader = make_reader()
    year = np.stack([reader.read(day) for day in range(366)])
    days = np.arange(366) * 365 / 366
    around = np.full((len(INITIAL), len(LEADS), *year.shape), np.nan, dtype=np.float32)
    for case, text in enumerate(INITIAL):
        for number, lead in enumerate(LEADS):
            day = CALENDAR.datetime(CALENDAR.parse(text) + lead).dayofyr - 1
            near = np.abs(days - (day // 5 * 5 + 2.5)) <= 30
            around[case, number, near] = year[near]
    names = {"channel": [c.name for c in reader.channels.output]}
    return xr.DataArray(around, names, ("case", "lead", "time", "channel", "lat", "lon"))


def expected_brier(scored: Scored, climate: xr.DataArray, name: str) -> dict[str, np.ndarray]:
    """Return metric -> (lead,), global, by the library."""
    scores = pytest.importorskip("scores")
    event = EVENTS[name]
    fields = [
        field.sel(channel=event["channel"]).astype(np.float64) for field in (scored.members, scored.truth, climate)
    ]
    sign = -1 if "below_quantile" in event else 1
    quantile = event.get("above_quantile", event.get("below_quantile"))
    if quantile is None:
        threshold = event["above"]
    else:
        with warnings.catch_warnings(action="ignore"):  # masked cells have nothing but NaN
            threshold = fields[2].quantile(quantile, "time").drop_vars("quantile")
    members, truth, normal = (sign * (field - threshold) for field in fields)
    has_climate = normal.notnull().any(("lat", "lon"))  # a day of the climate; sst is never everywhere
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
def test_brier_scores_are_the_librarys(scored: Scored, climate: xr.DataArray, name: str) -> None:
    expected = expected_brier(scored, climate, name)
    table = scored.table
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


def test_a_quantile_is_one_of_the_season(scored: Scored) -> None:
    """About a fifth of the cells are hot, a little less than a fifth as it gets warmer; by the whole year a tenth."""
    base = scored.table.scores_by_lead("model", "sst", "uncertainty:hot_sea")
    np.testing.assert_allclose(base, 0.18 * 0.82, atol=0.04)
    year = make_reader()
    year_values = np.stack([year.read(day)[1][~MASK] for day in range(366)])
    hot = scored.truth.sel(channel="sst").values[..., ~MASK] > np.quantile(year_values, 0.8, axis=0)
    assert hot.mean() < 0.06


def test_seeps_is_the_librarys(scored: Scored, climate: xr.DataArray) -> None:
    scores = pytest.importorskip("scores")
    rain = climate.sel(channel="tp").astype(np.float64)
    dry = (rain < DRY_BELOW_MM).sum("time") / rain.notnull().sum("time")
    heavy = rain.where(rain >= DRY_BELOW_MM).quantile(2 / 3, "time").drop_vars("quantile")
    members, truth = (field.sel(channel="tp").astype(np.float64) for field in (scored.members, scored.truth))
    penalties = scores.categorical.seeps(
        members, truth, dry, heavy, dry_light_threshold=np.nextafter(DRY_BELOW_MM, 0), preserve_dims="all"
    )
    expected = penalties.mean("member").weighted(AREA).mean(["case", "lat", "lon"])
    table = scored.table
    np.testing.assert_allclose(table.scores_by_lead("model", "tp", "seeps"), expected, rtol=1e-6)
    assert np.isnan(table.scores_by_lead("model", "t2m", "seeps")).all()
    # the climatological mean rains lightly every day: a constant forecast
    np.testing.assert_allclose(table.scores_by_lead("climatology", "tp", "seeps"), 1.0, atol=0.15)


def test_what_the_files_have(scored: Scored) -> None:
    with open(scored.folder / "scores.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    wanted = {"metric": "brier:heavy_rain", "region": "global", "season": "all", "lead_hours": "24"}
    rows_by_forecast = {row["forecast"]: row for row in rows if wanted.items() <= row.items()}
    assert set(rows_by_forecast) == {"model", "persistence", "damped_persistence", "climatology"}
    row = rows_by_forecast["model"]
    assert (row["variable"], row["units"], row["event"]) == ("tp", "1", "tp above 6 mm")
    assert {row["event"] for row in rows if ":" not in row["metric"] and row["metric"] != SHORT_WAVES} == {""}
    (seeps,) = (row for row in rows if {**wanted, "metric": "seeps", "forecast": "model"}.items() <= row.items())
    assert (seeps["variable"], seeps["units"]) == ("tp", "1")
    with xr.open_dataset(scored.folder / "scores.nc") as dataset:
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


def test_two_shares_are_one_to_the_last_bit(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(share: WorkShare) -> PartialScores:
        partial_scores = []
        monkeypatch.setattr(scorer, "score_and_gather", lambda score, is_sharded: partial_scores.append(score()))
        score_forecasts(config_of(scored.folder, events=EVENTS), make_reader(), scored.archive, share)
        return partial_scores[0]

    all_cases = part(WorkShare())
    joined = PartialScores.join([part(WorkShare(1, 2)), part(WorkShare(0, 2))])
    every = {"model", "persistence", "damped_persistence"}
    for sums, joined_statistics, keys in (
        (all_cases.events, joined.events, every),
        (all_cases.seeps, joined.seeps, every | {"climatology"}),
    ):
        assert set(sums) == set(joined_statistics) == keys
        for forecast, values in sums.items():
            for name, plane in values.arrays().items():
                np.testing.assert_array_equal(getattr(joined_statistics[forecast], name), plane)


def test_without_events_there_is_no_climate() -> None:
    reader = make_reader()
    scorer_without_events = EventScorer(VerificationConfig(), reader, [], None, None, None, None)
    assert scorer_without_events.attributes() == {}
    scorer_without_events.warn_of_missing_seeps(SeepsStatistics.empty(np.array([0]), 1, 0, 1, 1))


def test_without_a_training_period(scored: Scored, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Data from 2001 on alone: no climate. A number still makes an event, whose skill is not known."""
    reader = make_reader("2000-12-20")
    with pytest.raises(ConfigError, match="events.cold.below_quantile: 0.25 is a quantile.* 0 times within 30 days"):
        score_forecasts(config_of(tmp_path, events={"cold": EVENTS["cold"]}), reader, scored.archive)
    config = config_of(tmp_path, events={"warm": EVENTS["warm"]}, climatology={"harmonics": 0})
    table = score_forecasts(config, reader, scored.archive).table
    np.testing.assert_array_equal(
        table.scores_by_lead("model", "t2m", "brier:warm"), scored.table.scores_by_lead("model", "t2m", "brier:warm")
    )
    assert np.isnan(table.scores_by_lead("model", "t2m", "brier_skill:warm")).all()
    assert "seeps" not in table.dataset
    assert "Brier skill and SEEPS are not computed" in caplog.text
    assert "is dry" not in caplog.text


def test_a_dry_climate_has_no_seeps(scored: Scored, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = make_reader()
    dry = AnalyticReader(
        reader.channels,
        GRID,
        CALENDAR,
        reader.times,
        lambda t, c: weather(t, c) * (0.01 if c == 2 else 1),
        reader.masks,
    )
    table = score_forecasts(config_of(tmp_path), dry, scored.archive).table
    assert "seeps" not in table.dataset
    assert "brier" not in table.dataset
    assert "tp: SEEPS is not computed, because no cell is dry" in caplog.text
