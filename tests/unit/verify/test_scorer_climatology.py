"""A climatology of WeatherBench 2's layout through the whole scoring of the sample, against its ACC by xarray."""

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
# over the end of February, in a leap year and in another
STARTS = {
    "2000": ["2000-02-28T00:00", "2000-02-29T06:00", "2000-02-29T18:00"],
    "2001": ["2001-02-27T12:00", "2001-02-28T12:00"],
}
CHANNELS = ("z850", "z500", "t850", "t2m")


def config_of(folder: Path, year: str, **verification: object) -> Config:
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
    """Write the sample's first days of each hour, moved on from day to day, as WeatherBench 2 lays it out."""
    grid = reader.grid
    rng = np.random.default_rng(0)
    first = np.stack([reader.read(number) for number in range(4)]).astype(np.float64)
    drift = np.cos(2 * np.pi * np.arange(366) / 366) + 0.3 * rng.standard_normal(366)
    stored = {channel.name: number for number, channel in enumerate(reader.channels.time_varying_stored)}
    coords = {
        "hour": [0, 6, 12, 18], "dayofyear": np.arange(1, 367), "level": [500, 850], "longitude": grid.lon,
        "latitude": grid.lat[::-1],
    }  # fmt: skip
    fields = {}
    for name, long_name in NAMES.items():
        levels = {"z": ["z500", "z850"], "t": ["t850", "t850"], "t2m": ["t2m"]}[name]
        values = first[:, None, [stored[level] for level in levels]] * (1 + 1e-3 * drift)[None, :, None, None, None]
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
    """The sample, forecasts of it that are the truth of 18 hours before the valid time, and the file."""

    reader: StoreReader
    archives: dict[str, ForecastArchive]
    path: Path
    normal: xr.Dataset
    folder: Path


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    folder = tmp_path_factory.mktemp("wb2")
    reader = open_sources(config_of(folder, "2000").data)
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
def few_damping_samples() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "_DAMPING_SAMPLES", 3)
        yield


def score(sample: Sample, year: str, **verification: object) -> ScoreTable:
    conf = {"climatology": {"method": "file", "path": str(sample.path), "rename": NAMES}, **verification}
    return score_forecasts(config_of(sample.folder, year, **conf), sample.reader, sample.archives[year]).table


def labelled(sample: Sample, year: str, fields: np.ndarray, grid: LatLonGrid) -> xr.DataArray:
    """Return (start, lead, channel, latitude, longitude) with the valid time."""
    starts = np.array(STARTS[year], dtype="datetime64[ns]")
    valid = starts[:, None] + np.array(LEADS) * np.timedelta64(60, "s")
    coords = {"channel": list(CHANNELS), "latitude": grid.lat, "longitude": grid.lon}
    return xr.DataArray(
        fields.astype(np.float64), coords | {"valid_time": (("start", "lead"), valid)},
        ("start", "lead", "channel", "latitude", "longitude"),
    )  # fmt: skip


def expected(sample: Sample, year: str, onto: LatLonGrid | None = None) -> dict[str, xr.DataArray]:
    """Return metric -> (lead, channel), global, by WeatherBench 2's formulas; fields brought `onto` a grid first."""
    reader = sample.reader
    calendar = sample.reader.calendar
    starts = [calendar.parse(text) for text in STARTS[year]]
    truth, forecast = (
        np.stack([[reader.read(reader.index_of(t + lead - back)) for lead in LEADS] for t in starts])
        for back in (0, 1080)
    )
    when = labelled(sample, year, truth, reader.grid)["valid_time"]
    now = sample.normal.sel(dayofyear=when.dt.dayofyear, hour=when.dt.hour).sortby("latitude", ascending=False)
    parts = [now["geopotential"].sel(level=850), now["geopotential"].sel(level=500), now["temperature"].sel(level=850)]
    parts.append(now["2m_temperature"])
    order = ("start", "lead", "latitude", "longitude")
    normal = np.stack([part.transpose(*order).values for part in parts], axis=2)
    grid = reader.grid
    if onto is not None:
        file_grid, _ = LatLonGrid.from_coords(sample.normal["latitude"].values, sample.normal["longitude"].values)
        normal = Regridder(file_grid, onto, "conservative").apply(normal)
        bring = Regridder(reader.grid, onto, "conservative").apply
        grid = onto
        truth = bring(truth)
        forecast = bring(forecast)
    truth, forecast, normal = (labelled(sample, year, field, grid) for field in (truth, forecast, normal))
    edges = np.deg2rad(np.concatenate([[90.0], (grid.lat[1:] + grid.lat[:-1]) / 2, [-90.0]]))
    weights = truth["latitude"].copy(data=-np.diff(np.sin(edges)))

    def mean(field: xr.DataArray) -> xr.DataArray:
        return field.weighted(weights).mean(["latitude", "longitude"])

    forecast_anomaly = forecast - normal
    truth_anomaly = truth - normal
    acc = mean(forecast_anomaly * truth_anomaly) / np.sqrt(mean(forecast_anomaly**2) * mean(truth_anomaly**2))
    return {"acc_wb2": acc.mean("start"), "climatology": np.sqrt(mean(truth_anomaly**2).mean("start"))}


@pytest.mark.parametrize("year", list(STARTS))
def test_scores_are_those_of_weatherbench(sample: Sample, year: str) -> None:
    table = score(sample, year)
    wanted = expected(sample, year)
    for number, channel in enumerate(CHANNELS):
        acc = table.scores_by_lead("model", channel, "acc_wb2")
        rmse = table.scores_by_lead("climatology", channel)
        np.testing.assert_allclose(acc, wanted["acc_wb2"][:, number], rtol=0, atol=1e-6, err_msg=channel)
        np.testing.assert_allclose(rmse, wanted["climatology"][:, number], rtol=1e-6, err_msg=channel)
    assert table.dataset.attrs["climatology"] == f"file {sample.path.name}"
    assert 0.1 < abs(wanted["acc_wb2"]).min() < abs(wanted["acc_wb2"]).max() < 0.9999


def test_the_day_matters(sample: Sample) -> None:
    """A day off in the count of days would be seen in the test above."""
    moved = sample.normal.assign_coords(dayofyear=np.roll(np.arange(1, 367), 1)).sortby("dayofyear")
    other = Sample(sample.reader, sample.archives, sample.path, moved, sample.folder)
    for metric in ("acc_wb2", "climatology"):
        assert (abs(expected(other, "2000")[metric] / expected(sample, "2000")[metric] - 1) > 1e-4).any()


def test_another_grid_than_the_datas(sample: Sample, tmp_path: Path) -> None:
    """Data on 32 x 64, a climatology that is not, and scores on a third grid."""
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
        (score(sample, "2001", grid=grid), sample),
        (score(sample, "2001", grid=grid, **conf), other),
    ):
        wanted = expected(climatology_sample, "2001", onto)["acc_wb2"]
        for number, channel in enumerate(CHANNELS):
            acc = table.scores_by_lead("model", channel, "acc_wb2")
            np.testing.assert_allclose(acc, wanted[:, number], rtol=0, atol=1e-6, err_msg=channel)
    with pytest.raises(
        DataError, match="coarse.nc: its grid is not the grid of the data: 32 x 64 .* verification.grid"
    ):
        score(sample, "2001", **conf)
