"""Forecasts for WeatherBench-X: the layout of the stores, and its scores compared with those of `credit.score`.

``weatherbenchx_scores.csv`` has the scores that WeatherBench-X computed from the stores of this test. To recreate it:

    python -m tests.unit.forecast.export.test_weatherbench FOLDER
    python tests/unit/forecast/export/score_with_weatherbenchx.py FOLDER/weatherbench weatherbenchx_scores.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import credit
from credit.cli import main
from credit.interop.variable_names import VARIABLES, weatherbench_name

REPOSITORY = Path(__file__).parents[4]
INITIAL_TIMES = np.array(["2001-04-05", "2001-04-11T06", "2001-04-19", "2001-04-26"], dtype="datetime64[ns]")
LEAD_TIMES = np.array([24, 72], dtype="timedelta64[h]").astype("timedelta64[ns]")
# Weight of the initial state in each member.
PERSISTENCE = (0.2, 0.5, 0.9)
LONG_NAMES = {"z": "geopotential", "t": "temperature", "t2m": "2m_temperature", "msl": "mean_sea_level_pressure"}


def build_forecasts() -> xr.Dataset:
    """Return an ensemble whose members are mixtures of the true and the initial state."""
    fields = credit.open_sample()[list(LONG_NAMES)].astype(np.float32)
    initial = xr.DataArray(INITIAL_TIMES, dims="init_time", coords={"init_time": INITIAL_TIMES})
    lead = xr.DataArray(LEAD_TIMES, dims="lead_time", coords={"lead_time": LEAD_TIMES})
    weight = xr.DataArray(np.array(PERSISTENCE, dtype=np.float32), dims="member")
    truth = fields.sel(time=initial + lead).drop_vars("time")
    start = fields.sel(time=initial).drop_vars("time")
    members = weight * start + (1 - weight) * truth
    members = members.transpose("init_time", "lead_time", "member", ..., "latitude", "longitude")
    for name in members.data_vars:
        members[name].attrs = fields[name].attrs
    for name in members.coords:
        members[name].attrs = fields[name].attrs if name in fields.coords else {}
    return members.drop_attrs(deep=False)


def run_convert(folder: Path, *arguments: str) -> int:
    """Run ``credit convert`` on the forecasts in a folder."""
    config = str(REPOSITORY / "config" / "quickstart.yml")
    overrides = [f"save_loc={folder}", "inference.folder=forecasts"]
    return main._run_command("convert", [config, *overrides, *arguments], "credit convert")


def write_stores(folder: Path) -> Path:
    """Write the forecasts and their export; return the folder of the export."""
    (folder / "forecasts").mkdir(parents=True)
    build_forecasts().to_zarr(folder / "forecasts" / "forecasts.zarr", consolidated=False)
    assert run_convert(folder, "--weatherbench", str(folder / "weatherbench")) == 0
    return folder / "weatherbench"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stores(tmp_path_factory.mktemp("weatherbench"))


def test_layout(folder: Path) -> None:
    forecasts = xr.open_zarr(folder / "forecasts.zarr")
    truth = xr.open_zarr(folder / "truth.zarr")
    climatology = xr.open_zarr(folder / "climatology.zarr")
    assert set(forecasts) == set(truth) == set(climatology) == set(LONG_NAMES.values())
    cells = ("level", "latitude", "longitude")
    assert forecasts["geopotential"].dims == ("time", "prediction_timedelta", "number", *cells)
    assert forecasts["2m_temperature"].dims == ("time", "prediction_timedelta", "number", *cells[1:])
    assert truth["temperature"].dims == climatology["temperature"].dims == ("time", *cells)
    np.testing.assert_array_equal(forecasts["time"], INITIAL_TIMES)
    np.testing.assert_array_equal(forecasts["prediction_timedelta"], LEAD_TIMES)
    assert forecasts["level"].values.tolist() == truth["level"].values.tolist() == [250, 500, 850]
    assert forecasts["number"].values.tolist() == [0, 1, 2] and forecasts["geopotential"].attrs["units"] == "m2 s-2"
    valid_times = np.unique(INITIAL_TIMES[:, None] + np.array([0, *LEAD_TIMES.astype(np.int64)]).astype("m8[ns]"))
    np.testing.assert_array_equal(truth["time"], valid_times)
    np.testing.assert_array_equal(climatology["time"], valid_times)


def test_fields_are_those_of_the_files(folder: Path) -> None:
    forecasts = xr.open_zarr(folder / "forecasts.zarr")
    truth = xr.open_zarr(folder / "truth.zarr")
    # The rows of the sample may have another order.
    cells = {"latitude": truth["latitude"], "longitude": truth["longitude"]}
    expected = build_forecasts().sel(cells)
    fields = credit.open_sample().sel(cells)
    for name, long_name in LONG_NAMES.items():
        level_dim = next((dim for dim in expected[name].dims if str(dim).startswith("level")), None)
        levels = [None] if level_dim is None else expected[name][level_dim].values
        for level in levels:
            selection = {} if level is None else {level_dim: level}
            exported_selection = {} if level is None else {"level": int(level)}
            np.testing.assert_array_equal(forecasts[long_name].sel(exported_selection), expected[name].sel(selection))
            sample = fields[name].sel(selection).sel(time=truth["time"])
            np.testing.assert_array_equal(truth[long_name].sel(exported_selection), sample)
    # Temperature is on one level, geopotential on three.
    assert forecasts["temperature"].sel(level=[250, 500]).isnull().all()


def test_scores_are_those_of_weatherbenchx(folder: Path) -> None:
    scores = credit.score(
        build_forecasts(),
        credit.open_sample(),
        climatology_period=("2000-01-01", "2000-12-31"),
        allow_seen=True,
    ).sel(forecast="model", region="global", season="all")
    short_names = {long_name: name for name, long_name in LONG_NAMES.items()}
    with (Path(__file__).parent / "weatherbenchx_scores.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["score"] for row in rows} == {"rmse", "bias", "mae", "acc", "crps_fair", "spread"} and len(rows) == 72
    lead_hours = scores["lead"].values.astype(float).tolist()
    for row in rows:
        channel = short_names[row["variable"]] + row["level"]
        lead = scores["lead"].values[lead_hours.index(float(row["lead_hours"]))]
        value = float(scores[row["score"]].sel(channel=channel, lead=lead))
        assert value == pytest.approx(float(row["value"]), rel=1e-5, abs=1e-6), row


def test_weatherbenchx_itself(folder: Path) -> None:
    pytest.importorskip("weatherbenchX")
    from tests.unit.forecast.export.score_with_weatherbenchx import compute_scores

    with (Path(__file__).parent / "weatherbenchx_scores.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = (row["score"], row["variable"], row["level"], int(row["lead_hours"]))
            assert compute_scores(str(folder))[key] == pytest.approx(float(row["value"]), rel=1e-9)


def test_variables_can_be_renamed_on_export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "renamed")
    run_folder = folder.parent
    assert run_convert(run_folder, "--weatherbench", target, "--rename", "t2m=temperature") == 2
    assert "temperature" in capsys.readouterr().err and not Path(target).exists()
    assert run_convert(run_folder, "--weatherbench", target, "--rename", "q=humidity") == 2
    assert "--rename: q is not a variable of" in capsys.readouterr().err
    assert run_convert(run_folder, "--weatherbench", target, "--rename", "t2m=skin") == 0
    assert "skin" in xr.open_zarr(Path(target) / "truth.zarr")
    assert run_convert(run_folder, "--weatherbench", target) == 2
    assert "exists already" in capsys.readouterr().err


def test_names_of_variables() -> None:
    assert weatherbench_name("tp", False, 6) == "total_precipitation_6hr"
    assert weatherbench_name("tp", False) == "tp" and weatherbench_name("rain", False, 6) == "rain"
    # Without levels, `t` is not the temperature on levels, so its name does not change.
    assert weatherbench_name("t", True) == "temperature" and weatherbench_name("t", False) == "t"
    names = [name for entry in VARIABLES for name in entry.config_names]
    assert len(names) == len(set(names))


if __name__ == "__main__":
    write_stores(Path(sys.argv[1]))
