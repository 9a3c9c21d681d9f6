"""Tests of scores with a climatology in the layout of WeatherBench 2, against its ACC computed with xarray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.config import Config, build_config
from credit.data.formats.regrid import Regridder
from credit.data.sources.source_reader import open_sources
from credit.data.store.store_reader import StoreReader
from credit.errors import DataError
from credit.forecast.io.forecast_reader import ForecastArchive, open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.schema import OutputFields
from credit.grid import LatLonGrid
from credit.verify.scorer import score_forecasts
from credit.verify.scores import baselines
from credit.verify.table.table import ScoreTable

NAMES = {"z": "geopotential", "t": "temperature", "t2m": "2m_temperature"}
LEADS = [360, 1440]
# Forecasts around the end of February, in a leap year and in another year.
STARTS = {
    "2000": ["2000-02-28T00:00", "2000-02-29T06:00", "2000-02-29T18:00"],
    "2001": ["2001-02-27T12:00", "2001-02-28T12:00"],
}
CHANNELS = ("z850", "z500", "t850", "t2m")


def build_test_config(folder: Path, year: str, **verification: object) -> Config:
    train = ["2000-06-01", "2000-06-30"]
    splits = {"train": train, "valid": ["2001-05-01", "2001-05-03"], "test": [f"{year}-02-25", f"{year}-03-10"]}
    return build_config(
        {
            "save_loc": str(folder),
            "data": {
                "sources": [{"path": "sample:speedy"}],
                "levels": [850, 500],
                "variables": {"prognostic": {"vars_3D": ["z", "t"], "vars_2D": ["t2m"]}},
                "variable_options": {"t": {"levels": [850]}},
                "splits": splits,
            },
            "model": {"type": "wxformer"},
            "trainer": {"max_steps": 1},
            "verification": {"figure_leads": ["6h"], **verification},
        }
    )


def write_climatology(path: Path, reader: StoreReader) -> xr.Dataset:
    """Write a climatology in the layout of WeatherBench 2: the first day of the sample, with daily changes."""
    grid = reader.grid
    rng = np.random.default_rng(0)
    first_day = np.stack([reader.read(number) for number in range(4)]).astype(np.float64)
    drift = np.cos(2 * np.pi * np.arange(366) / 366) + 0.3 * rng.standard_normal(366)
    stored = {channel.name: number for number, channel in enumerate(reader.channels.time_varying_stored)}
    coords = {
        "hour": [0, 6, 12, 18], "dayofyear": np.arange(1, 367), "level": [500, 850], "longitude": grid.lon,
        "latitude": grid.lat[::-1],
    }  # fmt: skip
    fields = {}
    for name, long_name in NAMES.items():
        levels = {"z": ["z500", "z850"], "t": ["t850", "t850"], "t2m": ["t2m"]}[name]
        values = first_day[:, None, [stored[level] for level in levels]] * (1 + 1e-3 * drift)[None, :, None, None, None]
        values = values[..., ::-1, :].swapaxes(-1, -2).astype(np.float32)
        dims = ("hour", "dayofyear", "level", "longitude", "latitude")
        units = {"units": "m**2 s**-2" if name == "z" else "K"}
        fields[long_name] = (dims, values, units) if len(levels) == 2 else (dims[:2] + dims[3:], values[:, :, 0], units)
        fields[f"{long_name}_std"] = (fields[long_name][0], np.ones_like(fields[long_name][1]), units)
    dataset = xr.Dataset(fields, coords)
    dataset.to_zarr(path, zarr_format=2, consolidated=True)
    return dataset


@dataclass(frozen=True)
class Sample:
    """Data, forecasts and a climatology file; forecasts are the truth 18 hours before their valid time."""

    reader: StoreReader
    archives: dict[str, ForecastArchive]
    path: Path
    normal: xr.Dataset
    folder: Path


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    folder = tmp_path_factory.mktemp("wb2")
    reader = open_sources(build_test_config(folder, "2000").data)
    archives = {}
    for year, texts in STARTS.items():
        starts = [reader.calendar.parse(text) for text in texts]
        fields = OutputFields(reader.channels, reader.grid, reader.calendar, reader.attributes, 360)
        writer = ForecastWriter(folder / year, fields, LEADS, starts)
        for start in starts:
            writer.write(start, np.stack([reader.read(reader.index_of(start + lead - 1080)) for lead in LEADS]))
        archives[year] = open_forecasts(folder / year)
    path = folder / "1990-2019_6h_64x32_equiangular_conservative.zarr"
    return Sample(reader, archives, path, write_climatology(path, reader), folder)


@pytest.fixture(scope="module", autouse=True)
def limit_damping_samples() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "_DAMPING_SAMPLES", 3)
        yield


def score_sample(sample: Sample, year: str, **verification: object) -> ScoreTable:
    conf = {"climatology": {"method": "file", "path": str(sample.path), "rename": NAMES}, **verification}
    return score_forecasts(build_test_config(sample.folder, year, **conf), sample.reader, sample.archives[year]).table


def label_fields(sample: Sample, year: str, fields: np.ndarray, grid: LatLonGrid) -> xr.DataArray:
    """Return fields (start, lead, channel, latitude, longitude) with coordinates and their valid time."""
    starts = np.array(STARTS[year], dtype="datetime64[ns]")
    valid = starts[:, None] + np.array(LEADS) * np.timedelta64(60, "s")
    coords = {"channel": list(CHANNELS), "latitude": grid.lat, "longitude": grid.lon}
    return xr.DataArray(
        fields.astype(np.float64), coords | {"valid_time": (("start", "lead"), valid)},
        ("start", "lead", "channel", "latitude", "longitude"),
    )  # fmt: skip


def compute_expected_scores(sample: Sample, year: str, onto: LatLonGrid | None = None) -> dict[str, xr.DataArray]:
    """Return metric -> global scores (lead, channel) by WeatherBench 2's formulas, after regridding `onto` a grid."""
    reader = sample.reader
    calendar = sample.reader.calendar
    starts = [calendar.parse(text) for text in STARTS[year]]
    truth, forecast = (
        np.stack([[reader.read(reader.index_of(t + lead - minutes_before)) for lead in LEADS] for t in starts])
        for minutes_before in (0, 1080)
    )
    valid_times = label_fields(sample, year, truth, reader.grid)["valid_time"]
    climatology = sample.normal.sel(dayofyear=valid_times.dt.dayofyear, hour=valid_times.dt.hour).sortby(
        "latitude", ascending=False
    )
    parts = [
        climatology["geopotential"].sel(level=850),
        climatology["geopotential"].sel(level=500),
        climatology["temperature"].sel(level=850),
    ]
    parts.append(climatology["2m_temperature"])
    order = ("start", "lead", "latitude", "longitude")
    normal = np.stack([part.transpose(*order).values for part in parts], axis=2)
    grid = reader.grid
    if onto is not None:
        file_grid, _ = LatLonGrid.from_coords(sample.normal["latitude"].values, sample.normal["longitude"].values)
        normal = Regridder(file_grid, onto, "conservative").apply(normal)
        regrid = Regridder(reader.grid, onto, "conservative").apply
        grid = onto
        truth = regrid(truth)
        forecast = regrid(forecast)
    truth, forecast, normal = (label_fields(sample, year, field, grid) for field in (truth, forecast, normal))
    edges = np.deg2rad(np.concatenate([[90.0], (grid.lat[1:] + grid.lat[:-1]) / 2, [-90.0]]))
    weights = truth["latitude"].copy(data=-np.diff(np.sin(edges)))

    def mean(field: xr.DataArray) -> xr.DataArray:
        return field.weighted(weights).mean(["latitude", "longitude"])

    forecast_anomaly = forecast - normal
    truth_anomaly = truth - normal
    acc = mean(forecast_anomaly * truth_anomaly) / np.sqrt(mean(forecast_anomaly**2) * mean(truth_anomaly**2))
    return {"acc_wb2": acc.mean("start"), "climatology": np.sqrt(mean(truth_anomaly**2).mean("start"))}


@pytest.mark.parametrize("year", list(STARTS))
def test_scores_equal_those_of_weatherbench_formulas(sample: Sample, year: str) -> None:
    table = score_sample(sample, year)
    expected_scores = compute_expected_scores(sample, year)
    for number, channel in enumerate(CHANNELS):
        acc = table.scores_by_lead("model", channel, "acc_wb2")
        rmse = table.scores_by_lead("climatology", channel)
        np.testing.assert_allclose(acc, expected_scores["acc_wb2"][:, number], rtol=0, atol=1e-6, err_msg=channel)
        np.testing.assert_allclose(rmse, expected_scores["climatology"][:, number], rtol=1e-6, err_msg=channel)
    assert table.dataset.attrs["climatology"] == f"file {sample.path.name}"
    assert 0.1 < abs(expected_scores["acc_wb2"]).min() < abs(expected_scores["acc_wb2"]).max() < 0.9999


def test_a_shift_of_the_climatology_by_one_day_changes_scores(sample: Sample) -> None:
    """The test above therefore detects an error of one day in the day of the year."""
    moved = sample.normal.assign_coords(dayofyear=np.roll(np.arange(1, 367), 1)).sortby("dayofyear")
    other = Sample(sample.reader, sample.archives, sample.path, moved, sample.folder)
    for metric in ("acc_wb2", "climatology"):
        assert (
            abs(compute_expected_scores(other, "2000")[metric] / compute_expected_scores(sample, "2000")[metric] - 1)
            > 1e-4
        ).any()


def test_a_climatology_on_another_grid(sample: Sample, tmp_path: Path) -> None:
    """Data have 32 x 64 cells, the climatology has fewer, and scores are on a third grid."""
    onto = LatLonGrid.equiangular(8, 16, False)
    coarse = LatLonGrid.equiangular(16, 32, False)
    fields = {}
    for long_name in NAMES.values():
        field = sample.normal[long_name].transpose("hour", "dayofyear", ..., "latitude", "longitude")
        field = field.sortby("latitude", ascending=False)
        fields[long_name] = (
            field.dims,
            Regridder(sample.reader.grid, coarse, "conservative").apply(field.values),
            field.attrs,
        )
    coords = {name: sample.normal[name] for name in ("hour", "dayofyear", "level")}
    normal = xr.Dataset(fields, coords | {"latitude": coarse.lat, "longitude": coarse.lon})
    normal.to_netcdf(tmp_path / "coarse.nc")
    conf = {"climatology": {"method": "file", "path": str(tmp_path / "coarse.nc"), "rename": NAMES}}
    other = Sample(sample.reader, sample.archives, tmp_path / "coarse.nc", normal, sample.folder)
    grid = {"rows": 8, "columns": 16, "poles": False}
    for table, climatology_sample in (
        (score_sample(sample, "2001", grid=grid), sample),
        (score_sample(sample, "2001", grid=grid, **conf), other),
    ):
        expected_scores = compute_expected_scores(climatology_sample, "2001", onto)["acc_wb2"]
        for number, channel in enumerate(CHANNELS):
            acc = table.scores_by_lead("model", channel, "acc_wb2")
            np.testing.assert_allclose(acc, expected_scores[:, number], rtol=0, atol=1e-6, err_msg=channel)
    with pytest.raises(
        DataError, match="coarse.nc: its grid is not the grid of the data: 32 x 64 .* verification.grid"
    ):
        score_sample(sample, "2001", **conf)
