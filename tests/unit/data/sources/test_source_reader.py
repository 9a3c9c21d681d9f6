"""Tests of reading source files with any order, units, names and calendar, against the arrays written to them."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr

from credit.config.sections.source import SourceConfig
from credit.data.formats.files import OpenFiles, expand_paths
from credit.data.formats.variable_layout import VariableLayout
from credit.data.sources.source_reader import open_sources
from credit.errors import ConfigError, DataError
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W = 8, 16
SOUTH_UP = np.linspace(-78.75, 78.75, H)
FROM_MINUS_180 = np.arange(W) * 22.5 - 180


def reorder(fields: np.ndarray) -> np.ndarray:
    """Return fields on SOUTH_UP and FROM_MINUS_180 in the package's order."""
    return np.roll(fields[..., ::-1, :], -W // 2, axis=-1)


def test_channels_come_in_the_order_of_the_config(tmp_path: Path) -> None:
    t, z, t2m, ground = random_fields(4, 3, H, W), random_fields(4, 3, H, W, seed=1), random_fields(4, H, W), 3.0
    fields = {"t2m": t2m, "z": z, "t": t, "ground": np.full((H, W), ground, np.float32)}
    path = write_file(tmp_path / "a.nc", fields, levels=[250, 500, 850])
    reader = open_sources(make_config(path, p3=["t", "z"], p2=["t2m"], static=["ground"], levels=[850, 250]))
    assert [channel.name for channel in reader.channels.time_varying_stored] == ["t850", "t250", "z850", "z250", "t2m"]
    expected = np.stack([t[2, 2], t[2, 0], z[2, 2], z[2, 0], t2m[2]])
    np.testing.assert_array_equal(reader.read(2), expected)
    assert reader.read(2).dtype == np.float32
    assert reader.static().shape == (1, H, W) and (reader.static() == ground).all()
    assert reader.times.tolist() == [reader.calendar.parse(f"2000-01-01T{hour:02d}") for hour in (0, 6, 12, 18)]
    assert reader.index_of(reader.times[3]) == 3 and reader.index_of(reader.times[3] + 1) is None
    assert reader.attributes["t"] == {"units": "K"}


def test_only_requested_channels_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t, t2m = random_fields(4, 2, H, W), random_fields(4, H, W)
    path = write_file(tmp_path / "a.nc", {"t": t, "t2m": t2m}, levels=[500, 850])
    reader = open_sources(make_config(path, p3=["t"], p2=["t2m"], levels=[500, 850]))
    read_layout, names = VariableLayout.read, []

    def record_name(layout: VariableLayout, dataset: xr.Dataset, position: int) -> np.ndarray:
        names.append(layout.name)
        return read_layout(layout, dataset, position)

    monkeypatch.setattr(VariableLayout, "read", record_name)
    targets = [None, np.empty((H, W), np.float32), None]
    reader.read_into(2, targets)
    np.testing.assert_array_equal(targets[1], t[2, 1])
    assert names == ["t"]


@pytest.mark.parametrize("axes", [("level", "lon", "lat", "time"), ("lat", "time", "level", "lon")])
def test_any_order_of_dimensions_and_directions_is_read(tmp_path: Path, axes: tuple[str, ...]) -> None:
    t = random_fields(4, 2, H, W)
    transposed = np.moveaxis(t, [0, 1, 2, 3], [axes.index(name) for name in ("time", "level", "lat", "lon")])
    path = write_file(
        tmp_path / "a.nc", {"t": transposed}, lat=SOUTH_UP, lon=FROM_MINUS_180, levels=[500, 850], dims={"t": axes}
    )
    reader = open_sources(make_config(path, p3=["t"], levels=[850, 500]))
    assert reader.grid.lat[0] == SOUTH_UP[-1] and reader.grid.lon[0] == 0
    np.testing.assert_array_equal(reader.read(1), reorder(t[1])[::-1])


@pytest.mark.parametrize(
    ("file_levels", "units", "levels", "level_units"),
    [
        ([85000.0, 50000.0], "Pa", [500, 850], "hPa"),
        ([850.0, 500.0], "millibars", [50000, 85000], "Pa"),
        ([850.0, 500.0], None, [500, 850], "hPa"),
        ([85000.0, 50000.0], None, [500, 850], "hPa"),
        ([850.0004, 499.9998], "hPa", [500, 850], "hPa"),
        ([137.0, 96.0], "1", [96, 137], "model_level"),
    ],
)
def test_level_units_are_converted(
    tmp_path: Path, file_levels: list[float], units: str, levels: list[float], level_units: str
) -> None:
    t = random_fields(4, 2, H, W)
    path = write_file(tmp_path / "a.nc", {"t": t}, levels=file_levels, level_units=units)
    reader = open_sources(make_config(path, p3=["t"], levels=levels, level_units=level_units))
    np.testing.assert_array_equal(reader.read(0), t[0, ::-1])


def test_missing_level_is_not_replaced_by_its_neighbour(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.nc", {"t": random_fields(4, 2, H, W)}, levels=[500, 850])
    with pytest.raises(DataError, match=r"a\.nc: t has no level 501, 700 hPa; it has 500, 850 hPa"):
        open_sources(make_config(path, p3=["t"], levels=[501, 700, 850]))


def test_pressure_and_model_levels_are_not_mixed_up(tmp_path: Path) -> None:
    fields = {"t": random_fields(4, 2, H, W)}
    hybrid = write_file(tmp_path / "a.nc", fields, levels=[1, 2], level_units="hybrid_sigma_pressure")
    with pytest.raises(DataError, match="data.level_units: model_level"):
        open_sources(make_config(hybrid, p3=["t"], levels=[1]))
    pressure = write_file(tmp_path / "b.nc", fields, levels=[1, 2])
    with pytest.raises(DataError, match="is in hPa, but data.level_units is model_level"):
        open_sources(make_config(pressure, p3=["t"], levels=[1], level_units="model_level"))


def test_variables_in_the_wrong_list_are_refused(tmp_path: Path) -> None:
    fields = {"t": random_fields(4, 2, H, W), "t2m": random_fields(4, H, W)}
    path = write_file(tmp_path / "a.nc", fields, levels=[500, 850])
    with pytest.raises(DataError, match="t is in vars_2D but is on 2 levels.*"):
        open_sources(make_config(path, p2=["t"]))
    with pytest.raises(DataError, match="t2m is in vars_3D but has no levels"):
        open_sources(make_config(path, p3=["t2m"], levels=[850]))


def test_packed_values_and_packing_step_are_read(tmp_path: Path) -> None:
    t = np.round(random_fields(4, H, W) * 2) / 2
    path = write_file(tmp_path / "a.nc", {"t2m": t}, packed={"t2m": 0.5})
    reader = open_sources(make_config(path, p2=["t2m"]))
    np.testing.assert_array_equal(reader.read(3)[0], t[3])
    assert reader.packing_steps == {"t2m": 0.5}


def test_dimension_names_of_other_centres_are_read(tmp_path: Path) -> None:
    t = random_fields(2, 1, H, W)
    dataset = xr.Dataset(
        {"t": (("valid_time", "isobaricInhPa", "latitude", "longitude"), t)},
        {
            "valid_time": ("valid_time", [0, 21600], {"units": "seconds since 1970-01-01", "standard_name": "time"}),
            "isobaricInhPa": ("isobaricInhPa", [500.0]),
            "latitude": ("latitude", SOUTH_UP[::-1]),
            "longitude": ("longitude", np.arange(W) * 22.5),
            "number": 0,
            "time": ((), 0, {"units": "seconds since 1970-01-01", "standard_name": "forecast_reference_time"}),
        },
    )
    dataset.to_netcdf(tmp_path / "a.nc")
    reader = open_sources(make_config(tmp_path / "a.nc", p3=["t"], levels=[500]))
    np.testing.assert_array_equal(reader.read(1)[0], t[1, 0])
    assert reader.calendar.format(reader.times[1]) == "1970-01-01T06:00"


def test_field_with_a_scalar_time_and_level_is_read(tmp_path: Path) -> None:
    t = random_fields(1, 1, H, W)
    write_file(tmp_path / "a.nc", {"t": t}, hours=[6], levels=[500])
    with xr.open_dataset(tmp_path / "a.nc", decode_times=False) as dataset:
        dataset.squeeze().to_netcdf(tmp_path / "b.nc")
    reader = open_sources(make_config(tmp_path / "b.nc", p3=["t"], levels=[500]))
    np.testing.assert_array_equal(reader.read(0), t[0])


def test_another_dimension_must_have_length_one(tmp_path: Path) -> None:
    axes = {"t2m": ("time", "member", "lat", "lon")}
    grid = {"lat": SOUTH_UP, "lon": FROM_MINUS_180}
    two_members = write_file(tmp_path / "a.nc", {"t2m": random_fields(4, 2, H, W)}, dims=axes, **grid)
    with pytest.raises(DataError, match=r"dimension member \(2\) of t2m"):
        open_sources(make_config(two_members, p2=["t2m"]))
    t2m = random_fields(4, 1, H, W)
    reader = open_sources(make_config(write_file(tmp_path / "b.nc", {"t2m": t2m}, dims=axes, **grid), p2=["t2m"]))
    np.testing.assert_array_equal(reader.read(3)[0], reorder(t2m[3, 0]))


def test_bounds_of_latitude_are_used(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.nc", {"t2m": random_fields(4, 4, W)}, lat=[70, 20, -20, -70])
    edges = np.array([[90, 35], [35, 0], [0, -35], [-35, -90]], dtype=float)
    with netCDF4.Dataset(path, "a") as file:
        file["lat"].bounds = "lat_bnds"
        file.createDimension("two", 2)
        file.createVariable("lat_bnds", "f8", ("lat", "two"))[:] = edges
    reader = open_sources(make_config(path, p2=["t2m"]))
    np.testing.assert_array_equal(reader.grid.lat_bounds, [90, 35, 0, -35, -90])


def test_several_files_are_sorted_by_time(tmp_path: Path) -> None:
    t = random_fields(8, H, W)
    write_file(tmp_path / "era_200002.nc", {"t2m": t[:4]}, hours=range(0, 24, 6))
    write_file(tmp_path / "era_200001.nc", {"t2m": t[4:]}, hours=range(24, 48, 6))
    write_file(tmp_path / "era_2000xx.nc", {"t2m": t[:1]}, hours=[1000])
    reader = open_sources(make_config(tmp_path / "era_%Y%m.nc", p2=["t2m"]))
    assert np.diff(reader.times).tolist() == [360] * 7
    np.testing.assert_array_equal([reader.read(index)[0] for index in range(8)], t)


def test_nested_folders_are_searched(tmp_path: Path) -> None:
    t = random_fields(3, H, W)
    for number, name in enumerate(("2000.nc", "x/2001.nc", "x/y/2002.nc")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_file(tmp_path / name, {"t2m": t[number : number + 1]}, hours=[6 * number])
    assert len(open_sources(make_config(tmp_path / "**" / "%Y.nc", p2=["t2m"])).times) == 3
    assert len(open_sources(make_config(tmp_path / "x" / "**" / "*2.nc", p2=["t2m"])).times) == 1


def test_overlapping_files_must_have_equal_fields(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    t = random_fields(6, H, W)
    first_file = write_file(tmp_path / "a.nc", {"t2m": t[:4]}, hours=[0, 6, 12, 18])
    second_file = write_file(tmp_path / "b.nc", {"t2m": t[2:]}, hours=[12, 18, 24, 30])
    with caplog.at_level(logging.INFO):
        reader = open_sources(make_config([first_file, second_file], p2=["t2m"]))
    assert "2 times are in two files with equal fields" in caplog.text
    np.testing.assert_array_equal([reader.read(index)[0] for index in range(6)], t)
    write_file(second_file, {"t2m": t[2:] + 1}, hours=[12, 18, 24, 30])
    with pytest.raises(DataError, match=r"t2m at 2000-01-01T12:00 differs between .*a\.nc and .*b\.nc"):
        open_sources(make_config([first_file, second_file], p2=["t2m"]))


def test_duplicate_time_in_a_file_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.nc", {"t2m": random_fields(4, H, W)}, hours=[0, 6, 6, 12])
    with pytest.raises(DataError, match=r"a\.nc: 2000-01-01T06:00 occurs twice"):
        open_sources(make_config(path, p2=["t2m"]))


def test_sources_are_read_at_their_common_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    t, u = random_fields(4, H, W), random_fields(4, H, W, seed=1)
    first_file = write_file(tmp_path / "a.nc", {"t2m": t}, hours=[0, 6, 12, 18])
    second_file = write_file(tmp_path / "b.nc", {"wind": u}, hours=[6, 12, 18, 24], lat=SOUTH_UP, lon=FROM_MINUS_180)
    sources = [{"path": str(first_file)}, {"path": str(second_file), "rename": {"u10": "wind"}}]
    with caplog.at_level(logging.WARNING):
        reader = open_sources(make_config("", sources=sources, p2=["t2m", "u10"]))
    assert "2 of 5 times are left out" in caplog.text
    assert len(reader.times) == 3
    np.testing.assert_array_equal(reader.read(0), np.stack([t[1], reorder(u[0])]))
    write_file(second_file, {"wind": u}, hours=[100, 106, 112, 118])
    with pytest.raises(DataError, match="no time in common: t2m 2000-01-01T00:00.*u10 2000-01-05T04:00"):
        open_sources(make_config("", sources=sources, p2=["t2m", "u10"]))


def test_variable_in_two_sources_is_refused_unless_selected(tmp_path: Path) -> None:
    t = random_fields(4, H, W)
    first_file, second_file = (write_file(tmp_path / name, {"t2m": t, "u10": t}) for name in ("a.nc", "b.nc"))
    with pytest.raises(DataError, match="t2m is in data.sources 0 and 1"):
        open_sources(make_config("", sources=[{"path": str(first_file)}, {"path": str(second_file)}], p2=["t2m"]))
    sources = [{"path": str(first_file), "variables": ["t2m"]}, {"path": str(second_file), "variables": ["u10"]}]
    assert len(open_sources(make_config("", sources=sources, p2=["t2m", "u10"])).times) == 4


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.nc", {"t": random_fields(4, 2, H, W)}, levels=[500, 850])
    with pytest.raises(DataError) as error_info:
        open_sources(make_config(path, p3=["t"], p2=["t2n"], levels=[850, 333], static=["orography"]))
    text = str(error_info.value)
    assert text.startswith("3 problems") and "no level 333" in text and '"t2n"' in text and '"orography"' in text


def test_error_suggests_the_nearest_name(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.nc", {"temperature": random_fields(4, H, W)})
    with pytest.raises(DataError, match='"temperatur" is in no file.*did you mean "temperature"'):
        open_sources(make_config(path, p2=["temperatur"]))
    with pytest.raises(DataError, match='data.sources.0.variables: "temperatur" is not in its files'):
        sources = [{"path": str(path), "variables": ["temperatur"]}]
        open_sources(make_config("", sources=sources, p2=["temperatur"]))


def test_error_explains_why_a_variable_in_the_files_is_not_read(tmp_path: Path) -> None:
    fields = {"t2m": random_fields(4, H, W), "tp": random_fields(4, H, W), "co2": random_fields(4)}
    dims = {"t2m": ("time", "lat", "lon"), "tp": ("time", "lat", "lon"), "co2": ("time",)}
    lat, lon = np.linspace(90 - 90 / H, -90 + 90 / H, H), np.arange(W) * 360 / W
    path = write_file(tmp_path / "a.nc", fields, dims=dims, lat=lat, lon=lon)
    sources = [{"path": str(path), "variables": ["t2m"]}]
    with pytest.raises(DataError, match=r'"tp" is in the files of data\.sources\.0, but .*variables does not list tp'):
        open_sources(make_config("", sources=sources, p2=["t2m", "tp"]))
    with pytest.raises(DataError, match=r'"co2" is in the files .* no latitude and longitude \(dimensions: time\)'):
        open_sources(make_config(path, p2=["t2m"], forcing=["co2"]))


def test_invalid_paths_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "era_2000.nc", {"t2m": random_fields(4, H, W)})
    for path, message in {
        "era_2001.nc": "does not exist; .* contains era_2000.nc",
        "era_%Y%m.nc": "no file matches",
        "nowhere/*.nc": "the folder .*nowhere does not exist",
        ".": r"is a folder, not a zarr store; write .*\*\.nc",
    }.items():
        with pytest.raises(DataError, match=message):
            open_sources(make_config(tmp_path / path, p2=["t2m"]))
    with pytest.raises(DataError, match="%q is not supported; use %Y"):
        open_sources(make_config(tmp_path / "era_%q.nc", p2=["t2m"]))
    with pytest.raises(DataError, match='no sample data "speedi"; did you mean "speedy"'):
        open_sources(make_config("sample:speedi", p2=["t2m"]))


def test_variable_of_strings_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.nc", {"t2m": random_fields(4, H, W)})
    with xr.open_dataset(path, decode_times=False) as dataset:
        dataset["t2m"] = dataset["t2m"].astype(str)
        dataset.to_netcdf(tmp_path / "b.nc")
    with pytest.raises(DataError, match=r"b.nc: t2m has values of type"):
        open_sources(make_config(tmp_path / "b.nc", p2=["t2m"]))


def test_unusable_time_axis_is_refused(tmp_path: Path) -> None:
    fields = {"t2m": random_fields(4, H, W)}
    monthly_file = write_file(tmp_path / "a.nc", fields, units="months since 2000-01-01")
    with pytest.raises(DataError, match=r"a\.nc: time units .months since.* cannot be decoded"):
        open_sources(make_config(monthly_file, p2=["t2m"]))
    static_file = write_file(tmp_path / "b.nc", {"t2m": fields["t2m"][0]}, hours=None)
    with pytest.raises(DataError, match="no file of data.sources has a time axis"):
        open_sources(make_config(static_file, p2=["t2m"]))
    empty_file = write_file(tmp_path / "d.nc", {"t2m": fields["t2m"][:0]}, hours=[])
    with pytest.raises(DataError, match=r"d\.nc: the time axis has no time"):
        open_sources(make_config(empty_file, p2=["t2m"]))
    other_file = write_file(tmp_path / "c.nc", {"u10": fields["t2m"]})
    with pytest.raises(DataError, match=r"b\.nc: t2m has no time axis in the file"):
        open_sources(make_config([static_file, other_file], p2=["t2m", "u10"]))


def test_different_grids_are_refused(tmp_path: Path) -> None:
    first_file = write_file(tmp_path / "a.nc", {"t2m": random_fields(4, H, W)})
    second_file = write_file(tmp_path / "b.nc", {"u10": random_fields(4, H, W)}, lon=np.arange(W) * 22.5 + 11.25)
    with pytest.raises(DataError, match=r"a\.nc and .*b\.nc are on different grids: longitude 0 is 0 against 11.25"):
        open_sources(make_config([first_file, second_file], p2=["t2m", "u10"]))


def test_regional_grid_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.nc", {"t2m": random_fields(4, 4, W)}, lat=[50, 45, 40, 35])
    with pytest.raises(DataError, match=r"a\.nc: latitudes 35\.\.50 do not reach the poles"):
        open_sources(make_config(path, p2=["t2m"]))


def test_different_units_are_refused(tmp_path: Path) -> None:
    t = random_fields(4, H, W)
    first_file = write_file(tmp_path / "a.nc", {"t2m": t}, hours=[0, 6, 12, 18])
    celsius = {"t2m": {"units": "degC"}}
    second_file = write_file(tmp_path / "b.nc", {"t2m": t}, hours=[24, 30, 36, 42], attributes=celsius)
    with pytest.raises(DataError, match='t2m is in "K" in .*a.nc and in "degC" in .*b.nc'):
        open_sources(make_config([first_file, second_file], p2=["t2m"]))


@pytest.mark.parametrize(("calendar", "last"), [("360_day", "2000-02-30"), ("noleap", "2000-02-28")])
def test_other_calendars_are_read(tmp_path: Path, calendar: str, last: str) -> None:
    days = 60 if calendar == "360_day" else 59
    t = random_fields(days, H, W)
    path = write_file(tmp_path / "a.nc", {"t2m": t}, hours=np.arange(days) * 24, calendar=calendar)
    reader = open_sources(make_config(path, p2=["t2m"]))
    assert reader.calendar.name == calendar
    np.testing.assert_array_equal(reader.read(reader.index_of(reader.calendar.parse(last)))[0], t[-1])


def test_different_calendars_are_refused(tmp_path: Path) -> None:
    t = random_fields(4, H, W)
    first_file = write_file(tmp_path / "a.nc", {"t2m": t}, calendar="noleap")
    second_file = write_file(tmp_path / "b.nc", {"u10": t})
    with pytest.raises(DataError, match=r"b\.nc has the calendar standard, .*a\.nc has noleap"):
        open_sources(make_config([first_file, second_file], p2=["t2m", "u10"]))
    write_file(first_file, {"t2m": t}, calendar="proleptic_gregorian")
    assert len(open_sources(make_config([first_file, second_file], p2=["t2m", "u10"])).times) == 4


def test_static_fields_are_read(tmp_path: Path) -> None:
    ground = random_fields(H, W)
    fields = {"t2m": random_fields(4, H, W), "ground": np.stack([ground] * 4)}
    path = write_file(tmp_path / "a.nc", fields)
    np.testing.assert_array_equal(open_sources(make_config(path, p2=["t2m"], static=["ground"])).static()[0], ground)
    with pytest.raises(DataError, match="t2m is listed as static but varies in time"):
        open_sources(make_config(path, p2=["ground"], static=["t2m"]))
    static_file = write_file(tmp_path / "b.nc", {"land": ground}, hours=None)
    reader = open_sources(make_config([path, static_file], p2=["t2m"], static=["land", "sin_latitude"]))
    np.testing.assert_array_equal(reader.static(), ground[None])


@pytest.mark.parametrize("consolidated", [True, False])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")  # raised while writing
def test_zarr_equals_netcdf(tmp_path: Path, version: int, consolidated: bool) -> None:
    t = np.round(random_fields(4, 2, H, W) * 2) / 2
    path = write_file(tmp_path / "a.nc", {"t": t}, levels=[500, 850], packed={"t": 0.5}, lat=SOUTH_UP)
    with xr.open_dataset(path, decode_times=False) as dataset:
        kept_keys = ("dtype", "scale_factor", "add_offset", "_FillValue")
        for variable in dataset.variables.values():
            variable.encoding = {key: value for key, value in variable.encoding.items() if key in kept_keys}
        dataset.to_zarr(tmp_path / "a.zarr", zarr_format=version, consolidated=consolidated)
    netcdf_reader = open_sources(make_config(tmp_path / "a.nc", p3=["t"], levels=[850]))
    zarr_reader = open_sources(make_config(tmp_path / "a.zarr", p3=["t"], levels=[850]))
    np.testing.assert_array_equal(netcdf_reader.read(2), zarr_reader.read(2))
    assert zarr_reader.packing_steps == {"t": 0.5}


def test_few_files_stay_open_and_workers_open_their_own(tmp_path: Path) -> None:
    t = random_fields(6, H, W)
    paths = [write_file(tmp_path / f"{n}.nc", {"t2m": t[n : n + 1]}, hours=[6 * n]) for n in range(6)]
    reader = open_sources(make_config(paths, p2=["t2m"]))
    reader._files = OpenFiles([SourceConfig(path="")], max_files=2)
    np.testing.assert_array_equal([reader.read(index)[0] for index in range(6)], t)
    assert len(reader._files._datasets) == 2
    unpickled_reader = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(unpickled_reader.read(5)[0], t[5])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(reader.read, (4,))[0], t[4])


def test_date_pattern_is_checked_before_any_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data.sources.3.path"):
        expand_paths(SourceConfig(path=str(tmp_path / "%B.nc")), "data.sources.3")
