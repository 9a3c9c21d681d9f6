"""Tests of selecting one member, step or height of files that contain several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.config.sections.data import DataConfig
from credit.data.sources.source_reader import open_sources
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config, random_fields

H, W = 8, 16
LAT, LON = np.linspace(78.75, -78.75, H), np.arange(W) * 22.5


@pytest.fixture(params=["nc", "zarr"])
def member_file(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, np.ndarray]:
    """Write a file with t of three members and t2m without members. Return its path and the values of t."""
    t = random_fields(3, 4, H, W)
    dataset = xr.Dataset(
        {
            "t": (("number", "time", "lat", "lon"), t, {"units": "K"}),
            "t2m": (("time", "lat", "lon"), random_fields(4, H, W, seed=1), {"units": "K"}),
            "tagged": (("kind", "time", "lat", "lon"), t[:2]),
            "bare": (("nameless", "time", "lat", "lon"), t[:2]),
        },
        {
            "number": [0, 1, 5],
            "kind": ["an", "fc"],
            "height": ((), 2.0),
            "time": ("time", np.arange(4) * 6.0, {"units": "hours since 2000-01-01", "standard_name": "time"}),
            "lat": ("lat", LAT, {"units": "degrees_north"}),
            "lon": ("lon", LON, {"units": "degrees_east"}),
        },
    )
    path = tmp_path / f"a.{request.param}"
    dataset.to_netcdf(path) if request.param == "nc" else dataset.to_zarr(path, zarr_format=2, consolidated=True)
    return path, t


def build_config(path: Path, select: dict, *names: str) -> DataConfig:
    """Return a data section with one source."""
    return make_config("", sources=[{"path": str(path), "select": select}], p2=names)


def test_selection_is_by_value_and_not_by_position(member_file: tuple[Path, np.ndarray]) -> None:
    path, t = member_file
    reader = open_sources(build_config(path, {"number": 5, "height": 2}, "t", "t2m"))
    np.testing.assert_array_equal(reader.read(1)[0], t[2, 1])
    np.testing.assert_array_equal(reader.read(1)[1], random_fields(4, H, W, seed=1)[1])
    np.testing.assert_array_equal(open_sources(build_config(path, {"kind": "fc"}, "tagged")).read(0)[0], t[1, 0])


@pytest.mark.parametrize(
    ("select", "name", "reason"),
    [
        ({}, "t", r"dimension number \(3\) of t is not time, level, .*select: \{number: 0\}; it has 0, 1, 5"),
        ({"number": 2}, "t", "select: number 2 is not in the file; the file has 0, 1, 5"),
        ({"height": 10}, "t", "select: height 10 is not in the file; the file has 2"),
        ({"nummber": 1}, "t", 'names nummber, but it is not a coordinate of the file; did you mean "number"'),
        ({"nameless": 1}, "bare", "names nameless, but its dimension has no coordinate"),
        ({}, "bare", r"nameless \(2\) of bare has no coordinate variable.*cut the file to one position"),
    ],
)
def test_invalid_selections_are_refused(
    member_file: tuple[Path, np.ndarray], select: dict, name: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        open_sources(build_config(member_file[0], select, name))


TIME = {"units": "hours since 2000-01-01"}


@pytest.mark.parametrize("dims", [("began", "time"), ("time", "began")])
def test_second_time_dimension_of_length_one_is_accepted(tmp_path: Path, dims: tuple[str, str]) -> None:
    """Archives in the classic format may have the time of the analysis as a dimension in addition to the months."""
    t = random_fields(4, H, W)
    dataset = xr.Dataset(
        {"t": ((*dims, "lat", "lon"), t[None] if dims[0] == "began" else t[:, None], {"units": "K"})},
        {
            "began": ("began", [0.0], TIME),
            "time": ("time", np.arange(4) * 744.0, TIME),
            "lat": ("lat", LAT, {"units": "degrees_north"}),
            "lon": ("lon", LON, {"units": "degrees_east"}),
        },
    )
    dataset.to_netcdf(tmp_path / "a.nc", format="NETCDF3_CLASSIC")
    reader = open_sources(build_config(tmp_path / "a.nc", {}, "t"))
    assert [reader.calendar.format(time)[:10] for time in reader.times[:2]] == ["2000-01-01", "2000-02-01"]
    np.testing.assert_array_equal(reader.read(2)[0], t[2])


@pytest.mark.parametrize(
    ("time", "reason"),
    [
        (
            ("time", [f"2000-01-0{day}" for day in range(1, 5)]),
            r"time \(4\) of t has a coordinate that contains strings.*select: \{time: 2000-01-01\}; it has .*-04$",
        ),
        (
            ("time", np.arange(4.0), {**TIME, "standard_name": "forecast_reference_time"}),
            r"time \(4\) of t has the standard_name forecast_reference_time.*select: \{time: 0\}; it has 0, 1, 2, 3$",
        ),
        (
            ("lat", np.arange(8.0), TIME),
            r"dimension time \(4\) of t has no coordinate variable.*add the coordinate to the file",
        ),
        (
            ("time", np.arange(4.0), {"units": "degrees_north"}),
            r"time \(4\) and lat \(8\) of t are all latitude.*correct wrong attributes",
        ),
    ],
)
def test_invalid_time_axis_is_refused(tmp_path: Path, time: tuple, reason: str) -> None:
    coordinates = {"lat": ("lat", LAT, {"units": "degrees_north"}), "lon": ("lon", LON, {"units": "degrees_east"})}
    if time[0] == "time":
        coordinates["time"] = time
    dataset = xr.Dataset({"t": (("time", "lat", "lon"), random_fields(4, H, W), {"units": "K"})}, coordinates)
    dataset.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(DataError, match=reason):
        open_sources(build_config(tmp_path / "a.nc", {}, "t"))


def test_selected_forecast_step_has_its_valid_times(tmp_path: Path) -> None:
    """In files converted from GRIB, time is the initial time, and valid_time is a separate coordinate."""
    t = random_fields(2, 3, H, W)
    initial = {"units": "hours since 2000-01-01", "standard_name": "time", "long_name": "initial time of forecast"}
    dataset = xr.Dataset(
        {"t": (("time", "step", "lat", "lon"), t)},
        {
            "time": ("time", [0.0, 24.0], initial),
            "step": ("step", [0.0, 6.0, 12.0], {"units": "hours", "standard_name": "forecast_period"}),
            "valid_time": (("time", "step"), [[0.0, 6, 12], [24, 30, 36]], initial),
            "lat": ("lat", LAT, {"units": "degrees_north"}),
            "lon": ("lon", LON, {"units": "degrees_east"}),
        },
    )
    dataset.to_netcdf(tmp_path / "a.nc")
    reader = open_sources(build_config(tmp_path / "a.nc", {"step": 6}, "t"))
    assert [reader.calendar.format(time) for time in reader.times] == ["2000-01-01T06:00", "2000-01-02T06:00"]
    np.testing.assert_array_equal(reader.read(1)[0], t[1, 1])
