"""Precipitation through the commands: training on three-hourly sums in metres, forecasts and scores.

The test computes events, reliability and SEEPS again from the files, with xarray and the library `scores`.
"""

from __future__ import annotations

import csv
import itertools
import operator
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import yaml

from tests.smoke.conftest import CONFIG

MEMBERS, LEADS, DRY_BELOW_M = 3, (6, 12, 18, 24), 0.25e-3
CELLS = ("latitude", "longitude")
# The climate of the thresholds is that of the training period.
TRAIN = ["2000-01-01", "2000-02-28T18:00"]
EVENTS = {"wet": {"channel": "tp", "above": 0.0005}, "heavy": {"channel": "tp", "above_quantile": 0.8},
          "dry": {"channel": "tp", "below": DRY_BELOW_M}}  # fmt: skip


def write_weather(folder: Path) -> None:
    """Write the first months of the bundled sample at twice the grid spacing, and precipitation in a file of its own.

    Precipitation falls where the 500 hPa surface sinks. Its amount grows with temperature and varies at random. Two
    cells in three are dry.
    """
    sample = resources.files("credit.data") / "bundled" / "speedy" / "speedy_2000q1.nc"
    with xr.open_dataset(str(sample)) as data, xr.set_options(keep_attrs=True):
        coarse = data[["z", "t2m"]].coarsen(latitude=2, longitude=2).mean().load()
    coarse.drop_encoding().to_netcdf(folder / "air.nc")

    rng = np.random.default_rng(7)
    sinking = -coarse["z"].isel(level_z=1, drop=True).diff("time")
    lift = sinking / sinking.std("time")
    amount = np.exp(0.05 * (coarse["t2m"][1:] - 273.15)) * rng.gamma(0.7, 1.0, lift.shape)
    halves = 4e-3 * np.maximum(lift - 0.2, 0.0) * amount
    share = xr.DataArray(rng.random(halves.shape), halves.coords)
    earlier = (halves * share).assign_coords(time=halves["time"] - np.timedelta64(3, "h"))
    tp = xr.concat([earlier, halves * (1 - share)], "time").sortby("time").astype(np.float32)
    tp.attrs = {"units": "m", "cell_methods": "time: sum", "standard_name": "lwe_thickness_of_precipitation_amount"}
    begin = tp["time"].values - np.timedelta64(3, "h")
    tp["time"].attrs = {"bounds": "time_bnds", "standard_name": "time"}
    rain = xr.Dataset({"tp": tp, "time_bnds": (("time", "bnds"), np.stack([begin, tp["time"].values], axis=1))})
    rain["time"].encoding = rain["time_bnds"].encoding = {"units": "hours since 2000-01-01", "dtype": "float64"}
    rain.to_netcdf(folder / "rain.nc")


def write_config(folder: Path) -> Path:
    variable_options = {"tp": {"temporal": "accumulate", "minimum": 0}}
    data = {
        "sources": [{"path": str(folder / "air.nc")}, {"path": str(folder / "rain.nc")}],
        "levels": [850, 500],
        "variables": {
            "prognostic": {"vars_3D": ["z"], "vars_2D": ["t2m"]},
            "diagnostic": {"vars_2D": ["tp"]},
            "static": {"vars_2D": ["sin_latitude"]},
        },
        "variable_options": variable_options,
        "transforms": {"tp": {"kind": "log1p", "unit": 0.0002}},
        "splits": {"train": TRAIN, "valid": ["2000-03-02", "2000-03-05"], "test": ["2000-03-08", "2000-03-24"]},
        "split_gap": "1d",
    }
    config = {
        **CONFIG, "experiment": "rain", "save_loc": str(folder / "run"), "data": data,
        "trainer": CONFIG["trainer"] | {"max_steps": 12, "validate_every": 12, "checkpoint_every": 12},
        "inference": {
            "lead_time": "24h", "initial_times": {"every": "72h"}, "batch_size": 8,
            "ensemble": {"members": MEMBERS, "feature_noise": {"std": 1.0}, "control": False},
        },
        "verification": CONFIG["verification"] | {"figure_leads": ["24h"], "figure_channels": ["tp"], "events": EVENTS},
    }  # fmt: skip
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def select_climate(truth: xr.DataArray, valid: np.datetime64) -> xr.DataArray:
    """Return the truth at times of the training period near a valid time in the year.

    The year is divided into periods of five days. The times lie within 30 days of the middle of the period
    of the valid time.
    """

    def day(times: xr.DataArray | np.ndarray) -> np.ndarray:
        hours = (np.asarray(times) - np.datetime64("2000-01-01")) / np.timedelta64(1, "h")
        return hours / 24 / 366 * 365

    train = truth.sel(time=slice(*TRAIN))
    return train[np.abs(day(train["time"]) - (day(valid) // 5 * 5 + 2.5)) <= 30]


def compute_expected_scores(
    members: xr.DataArray, observed: xr.DataArray, initial: xr.DataArray, climate: xr.DataArray
) -> dict[tuple[str, str], xr.DataArray]:
    """Return the scores of each cell for one case and lead time, by forecast and metric.

    A score is a SEEPS penalty, a Brier score, or a frequency of the reliability diagram.
    """
    scores = pytest.importorskip("scores")
    dry = (climate < DRY_BELOW_M).mean("time")
    heavy = climate.where(climate >= DRY_BELOW_M).quantile(2 / 3, "time").drop_vars("quantile")
    limits = {"dry_light_threshold": np.nextafter(DRY_BELOW_M, 0), "preserve_dims": "all"}
    penalties = {
        ("model", "seeps"): scores.categorical.seeps(members, observed, dry, heavy, **limits).mean("member"),
        ("persistence", "seeps"): scores.categorical.seeps(initial, observed, dry, heavy, **limits),
    }
    thresholds = {
        "wet": EVENTS["wet"]["above"],
        "heavy": climate.quantile(0.8, "time").drop_vars("quantile"),
        "dry": DRY_BELOW_M,
    }
    for name, threshold in thresholds.items():
        sign = -1 if name == "dry" else 1
        beyond, happened = sign * (members - threshold), sign * (observed - threshold)
        options = {"event_threshold_operator": operator.gt, "preserve_dims": "all"}
        for metric, fair in (("brier", False), ("brier_fair", True)):
            penalties["model", f"{metric}:{name}"] = scores.probability.brier_score_for_ensemble(
                beyond, happened, "member", 0.0, fair_correction=fair, **options
            ).isel(threshold=0, drop=True)
        normal = (sign * (climate - threshold) > 0).mean("time")
        penalties["climatology", f"brier:{name}"] = (normal - (happened > 0)) ** 2
        # Reliability diagram: frequency of `count` members beyond the threshold, alone and together with the event.
        for count in range(MEMBERS + 1):
            forecast = (beyond > 0).sum("member") == count
            penalties[f"forecast {count}", name] = forecast.astype(np.float64)
            penalties[f"both {count}", name] = (forecast & (happened > 0)).astype(np.float64)
    return penalties


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:`prob_dry` contains:UserWarning")
def test_precipitation_scores_equal_those_computed_from_files(tmp_path: Path, command) -> None:
    write_weather(tmp_path)
    config, run = write_config(tmp_path), tmp_path / "run"
    for name in ("check", "train", "rollout", "verify"):
        result = command(name, config)
        assert result.returncode == 0, f"{name}: {result.stdout}{result.stderr}"
    truth = xr.load_dataset(tmp_path / "rain.nc")["tp"].rolling(time=2).sum()[1::2].astype(np.float64)
    assert 0.5 < (truth < DRY_BELOW_M).mean() < 0.8 and truth.max() > 0.02
    area = np.cos(np.deg2rad(truth["latitude"].astype(np.float64)))  # The rows are equally spaced in latitude.

    collected: dict[tuple[int, str, str], list[xr.DataArray]] = {}
    for path in sorted((run / "forecasts").glob("*.nc")):
        with xr.open_dataset(path) as data:
            assert data["tp"].attrs["units"] == "m" and data["tp"].attrs["cell_methods"] == "time: sum"
            # The coordinates differ by rounding.
            truth_cells = {name: truth[name] for name in CELLS}
            case = data["tp"].astype(np.float64).reindex(truth_cells, method="nearest", tolerance=1e-4).load()
        assert case.sizes["time"] == len(LEADS) and case.sizes["member"] == MEMBERS
        for number, lead in enumerate(LEADS):
            valid = case["time"].values[number]
            climate = select_climate(truth, valid)
            assert climate.sizes["time"] >= 20
            observed, initial = (
                truth.sel(time=valid - np.timedelta64(back, "h")).drop_vars("time") for back in (0, lead)
            )
            for score_key, cells in compute_expected_scores(
                case.isel(time=number, drop=True), observed, initial, climate
            ).items():
                collected.setdefault((lead, *score_key), []).append(cells)
    expected = {
        score_key: xr.concat(case_scores, "case").weighted(area).mean(("case", *CELLS)).item()
        for score_key, case_scores in collected.items()
    }
    assert all(len(case_scores) == 6 for case_scores in collected.values())

    with open(run / "scores.csv", newline="") as handle:
        rows = [row for row in csv.DictReader(handle) if (row["region"], row["season"]) == ("global", "all")]
    values = {
        (int(row["lead_hours"]), row["forecast"], row["metric"]): float(row["value"])
        for row in rows
        if row["variable"] == "tp"
    }
    for (lead, forecast, metric), value in expected.items():
        if forecast in ("model", "persistence", "climatology"):
            assert values[lead, forecast, metric] == pytest.approx(value, rel=1e-7), (lead, forecast, metric)
    with xr.open_dataset(run / "scores.nc") as data:
        model_scores = data.sel(forecast="model", region="global")
        for (lead, event), count in itertools.product(itertools.product(LEADS, EVENTS), range(MEMBERS + 1)):
            forecast, both = (expected[lead, f"{frequency} {count}", event] for frequency in ("forecast", "both"))
            point = model_scores.sel(lead=lead, event=event).isel(members_beyond=count)
            assert point["forecast_frequency"] == pytest.approx(forecast, rel=1e-7)
            assert point["observed_frequency"] == pytest.approx(both / forecast, rel=1e-7)
    for lead, event in itertools.product(LEADS, EVENTS):
        parts = [values[lead, "model", f"{part}:{event}"] for part in ("reliability", "resolution", "uncertainty")]
        assert parts[0] - parts[1] + parts[2] == pytest.approx(values[lead, "model", f"brier:{event}"], abs=1e-7)
        skill = 1 - expected[lead, "model", f"brier:{event}"] / expected[lead, "climatology", f"brier:{event}"]
        assert values[lead, "model", f"brier_skill:{event}"] == pytest.approx(skill, abs=1e-7)
