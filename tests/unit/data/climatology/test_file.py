"""Tests of climatology files in WeatherBench 2's layout, with any order of dimensions, against xarray's selection."""

from __future__ import annotations

import logging
from pathlib import Path

import fsspec
import numpy as np
import pytest
import xarray as xr

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig
from credit.config.sections.verification import ClimatologyConfig
from credit.data.climatology import file as module
from credit.data.climatology.climatology import Climatology
from credit.data.climatology.file import load_climatology
from credit.errors import ConfigError, DataError
from credit.grid import LatLonGrid
from tests.unit.analytic_reader import ATTRIBUTES, make_grid

VARIABLES = {"prognostic": {"vars_3D": ["z", "t"], "vars_2D": ["t2m"]}}
CHANNELS = ChannelMap.build(VARIABLES, [850.0, 500.0]).time_varying_stored
NAMES = {"z": "geopotential", "t": "temperature", "t2m": "2m_temperature"}
GRID = make_grid(6, 8)
ORDERS = [
    ("hour", "dayofyear", "level", "longitude", "latitude"),
    ("latitude", "level", "longitude", "dayofyear", "hour"),
]


def build_wb2_dataset(
    days: int = 366, hours: tuple[int, ...] = (0, 6, 12, 18), order: tuple[str, ...] = ORDERS[0]
) -> xr.Dataset:
    """Return noise in WeatherBench 2's layout: rows from the south, three levels, means and standard deviations."""
    rng = np.random.default_rng(0)
    sizes = {"hour": len(hours), "dayofyear": days, "level": 3, "latitude": 6, "longitude": 8}
    coords = {
        "hour": list(hours), "dayofyear": np.arange(1, days + 1), "level": [250, 500, 850],
        "latitude": GRID.lat[::-1], "longitude": GRID.lon,
    }  # fmt: skip
    fields = {}
    for name, units in (("geopotential", "m**2 s**-2"), ("temperature", "K"), ("2m_temperature", "K")):
        dims = tuple(dim for dim in order if not (dim == "level" and name.startswith("2m")))
        shape = [sizes[dim] for dim in dims]
        fields[name] = (dims, rng.standard_normal(shape).astype(np.float32), {"units": units})
        fields[f"{name}_std"] = (dims, np.ones(shape, dtype=np.float32), {"units": units})
    return xr.Dataset(fields, coords)


def build_data_config(**source: object) -> DataConfig:
    splits = {"train": ["2000-01-01", "2000-06-30"], "valid": ["2001-01-01", "2001-01-02"]}
    splits["test"] = ["2001-02-01", "2001-02-02"]
    raw = {"sources": [{"path": "x.nc", **source}], "levels": [850, 500], "variables": VARIABLES, "splits": splits}
    return DataConfig.model_validate(raw)


def load_test_climatology(
    path: Path | str, conf: DataConfig | None = None, calendar: str = "standard", grid: LatLonGrid | None = GRID,
    channels: list = CHANNELS, attributes: dict = ATTRIBUTES, **options: object,
) -> Climatology:  # fmt: skip
    climatology_config = ClimatologyConfig(method="file", path=str(path), **options)
    return load_climatology(
        climatology_config, conf or build_data_config(), channels, Calendar(calendar), attributes, grid
    )[0]


def write_dataset(dataset: xr.Dataset, path: Path) -> Path:
    """Write netCDF or zarr, according to the suffix. The name of a zarr store contains its format."""
    if path.suffix == ".nc":
        dataset.to_netcdf(path)
    else:
        version = 2 if "v2" in path.name else 3
        dataset.to_zarr(path, zarr_format=version, consolidated=version == 2)
    return path


def select_expected_fields(dataset: xr.Dataset, time: str) -> np.ndarray:
    """Return (channel, row, column) selected as in WeatherBench 2, by day of the year and hour."""
    valid_time = xr.DataArray(np.datetime64(time, "ns"))
    selection = {"dayofyear": valid_time.dt.dayofyear} | (
        {"hour": valid_time.dt.hour} if "hour" in dataset.coords else {}
    )
    selected_dataset = dataset.sel(selection).sortby("latitude", ascending=False)
    fields = []
    for channel in CHANNELS:
        values = selected_dataset[NAMES[channel.variable]].transpose(..., "latitude", "longitude")
        fields.append(values if channel.level is None else values.sel(level=channel.level))
    return np.stack(fields)


TIMES = ["2000-02-29T06:00", "2000-03-01T06:00", "2001-03-01T06:00", "2000-12-31T18:00", "2001-12-31T00:00"]


@pytest.mark.parametrize("order", ORDERS, ids=["hour first", "hour last"])
@pytest.mark.parametrize("name", ["a.nc", "a_v2.zarr", "a_v3.zarr"])
@pytest.mark.parametrize("small", [True, False], ids=["whole", "by day"])
def test_fields_equal_those_that_xarray_selects(
    tmp_path: Path, order: tuple[str, ...], name: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(module, "CACHE_BYTES", 0)
    dataset = build_wb2_dataset(order=order)
    climatology = load_test_climatology(write_dataset(dataset, tmp_path / name), rename=NAMES)
    for time in TIMES:
        fields = climatology.evaluate(Calendar().parse(time))
        assert fields.dtype == np.float32
        np.testing.assert_array_equal(fields, select_expected_fields(dataset, time), err_msg=time)
    assert climatology.names == ("z850", "z500", "t850", "t500", "t2m")
    assert climatology.short_period_warning is None
    assert climatology.description == f"file {name}"


def test_first_of_march_is_day_60_or_61(tmp_path: Path) -> None:
    climatology = load_test_climatology(write_dataset(build_wb2_dataset(), tmp_path / "a.nc"), rename=NAMES)
    leap_day, first_in_leap_year, first_in_common_year = (
        climatology.evaluate(Calendar().parse(time)) for time in TIMES[:3]
    )
    np.testing.assert_array_equal(leap_day, first_in_common_year)
    assert (first_in_leap_year != first_in_common_year).all()


def test_rename_of_the_sources_applies_to_the_climatology(tmp_path: Path) -> None:
    dataset = build_wb2_dataset()
    path = write_dataset(dataset, tmp_path / "a.nc")
    np.testing.assert_array_equal(
        load_test_climatology(path, build_data_config(rename=NAMES)).evaluate(0),
        select_expected_fields(dataset, "1900-01-01"),
    )
    renamed_path = write_dataset(
        dataset.rename({name_in_file: name for name, name_in_file in NAMES.items()}), tmp_path / "b.nc"
    )
    np.testing.assert_array_equal(
        load_test_climatology(renamed_path, build_data_config(rename=NAMES)).evaluate(0),
        select_expected_fields(dataset, "1900-01-01"),
    )
    with pytest.raises(
        DataError, match='no variable t2m or 2m_temp; did you mean "2m_temperature".*rename maps t2m to'
    ):
        load_test_climatology(path, build_data_config(rename=NAMES | {"t2m": "2m_temp"}))


def test_daily_values_apply_to_all_hours(tmp_path: Path) -> None:
    dataset = build_wb2_dataset().isel(hour=0, drop=True)
    climatology = load_test_climatology(write_dataset(dataset, tmp_path / "a.nc"), rename=NAMES)
    for time in ("2001-03-01T00:00", "2001-03-01T15:00"):
        np.testing.assert_array_equal(
            climatology.evaluate(Calendar().parse(time)), select_expected_fields(dataset, time)
        )


def test_hours_without_a_coordinate_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has the dimension hour, but no coordinate with the hours"):
        load_test_climatology(write_dataset(build_wb2_dataset().drop_vars("hour"), tmp_path / "a.nc"), rename=NAMES)


def test_missing_hours_are_refused(tmp_path: Path) -> None:
    climatology = load_test_climatology(
        write_dataset(build_wb2_dataset(hours=(0, 12)), tmp_path / "a.nc"), rename=NAMES
    )
    with pytest.raises(
        DataError, match=r"none of its times of the day \(00:00, 12:00\); .*climatology.path needs a file"
    ):
        climatology.evaluate(Calendar().parse("2001-03-01T06:00"))


@pytest.mark.parametrize(
    ("calendar", "days", "works"),
    [
        ("standard", 365, False),
        ("noleap", 365, True),
        ("noleap", 366, True),
        ("360_day", 360, True),
        ("360_day", 366, False),
    ],
)
def test_number_of_days_must_fit_the_calendar(tmp_path: Path, calendar: str, days: int, works: bool) -> None:
    path = write_dataset(build_wb2_dataset(days), tmp_path / "a.nc")
    if not works:
        with pytest.raises(DataError, match=f"{days} days, but the longest year of the data's calendar, {calendar}"):
            load_test_climatology(path, calendar=calendar, rename=NAMES)
        return
    climatology = load_test_climatology(path, calendar=calendar, rename=NAMES)
    last = Calendar(calendar).parse("2001-12-30T12:00")
    day = 360 if calendar == "360_day" else 364
    field = build_wb2_dataset(days).sel(hour=12, dayofyear=day)["2m_temperature"].transpose("latitude", "longitude")
    np.testing.assert_array_equal(climatology.evaluate(last)[-1], field.values[::-1])


def test_units_are_converted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("cf_units")
    dataset = build_wb2_dataset()
    dataset["2m_temperature"].attrs["units"] = "degC"
    del dataset["temperature"].attrs["units"]
    with caplog.at_level(logging.WARNING):
        fields = load_test_climatology(write_dataset(dataset, tmp_path / "a.nc"), rename=NAMES).evaluate(0)
    expected_fields = select_expected_fields(dataset, "1900-01-01")
    np.testing.assert_allclose(fields[-1], expected_fields[-1] + 273.15, rtol=1e-6)
    np.testing.assert_array_equal(fields[:-1], expected_fields[:-1])
    assert "temperature has no units; the units of the data, K, are assumed" in caplog.text
    dataset["2m_temperature"].attrs["units"] = "Pa"
    with pytest.raises(DataError, match="measure different quantities"):
        load_test_climatology(write_dataset(dataset, tmp_path / "b.nc"), rename=NAMES)


def test_climatology_is_read_from_a_url(tmp_path: Path) -> None:
    dataset = build_wb2_dataset()
    memory = fsspec.filesystem("memory")
    memory.put(str(write_dataset(dataset, tmp_path / "a_v2.zarr")), "/test_climatology/a.zarr", recursive=True)
    try:
        climatology = load_test_climatology(
            "memory://test_climatology/a.zarr", rename=NAMES, storage_options={"asynchronous": False}
        )
        np.testing.assert_array_equal(climatology.evaluate(0), select_expected_fields(dataset, "1900-01-01"))
        assert climatology.description == "file a.zarr"
    finally:
        memory.rm("/test_climatology", recursive=True)


def test_long_chunks_of_a_large_file_cause_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_dataset(build_wb2_dataset().chunk({"dayofyear": 366}), tmp_path / "a_v2.zarr")
    load_test_climatology(path, rename=NAMES)
    assert not caplog.text
    monkeypatch.setattr(module, "CACHE_BYTES", 0)
    load_test_climatology(path, rename=NAMES)
    assert "a chunk contains 366 days of the year" in caplog.text


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    path = write_dataset(build_wb2_dataset(), tmp_path / "a.nc")
    with pytest.raises(DataError, match="climatology.path: .*none.nc does not exist.* contains a.nc"):
        load_test_climatology(tmp_path / "none.nc")
    with pytest.raises(DataError, match="grid is not the grid of the data: .*set verification.grid to regrid both"):
        load_test_climatology(path, grid=make_grid(8, 8), rename=NAMES)
    with pytest.raises(DataError, match="has no level 300"):
        load_test_climatology(
            path,
            channels=ChannelMap.build({"prognostic": {"vars_3D": ["z"], "vars_2D": []}}, [300.0]).time_varying_stored,
            rename=NAMES,
        )
    with pytest.raises(DataError, match="geopotential has levels, but t2m has none"):
        load_test_climatology(path, channels=CHANNELS[-1:], rename={"t2m": "geopotential"})
    with pytest.raises(DataError, match="2m_temperature has no levels, but t850 is on a level"):
        load_test_climatology(path, channels=CHANNELS[2:4], rename={"t": "2m_temperature"})
    with pytest.raises(DataError, match="coordinate dayofyear, 1, 2, ... 366, but has 1 to 365, 183 values"):
        load_test_climatology(
            write_dataset(build_wb2_dataset().isel(dayofyear=slice(None, None, 2)), tmp_path / "b.nc"), rename=NAMES
        )
    with pytest.raises(DataError, match="dayofyear.* no such coordinate.*groupby"):
        load_test_climatology(
            write_dataset(build_wb2_dataset().rename(dayofyear="day"), tmp_path / "c.nc"), rename=NAMES
        )
    with pytest.raises(DataError, match="has the dimensions quantile, .*select one position along each of them"):
        load_test_climatology(
            write_dataset(build_wb2_dataset().expand_dims(quantile=[0.1, 0.9]), tmp_path / "d.nc"), rename=NAMES
        )
    with pytest.raises(DataError, match="matches 4 files"):
        load_test_climatology(tmp_path / "*.nc")
    with pytest.raises(ValueError, match="rename and storage_options are only for method: file"):
        ClimatologyConfig(rename={"z": "geopotential"})
    with pytest.raises(ConfigError, match="cf-units|not a unit"):
        load_test_climatology(path, rename=NAMES, attributes={"z": {"units": "nothing at all"}})
