"""Reader of forecasts: files and stores of this package and of other programs, and refusals of mixed runs."""

from __future__ import annotations

from pathlib import Path

import fsspec
import netCDF4
import numpy as np
import pytest
import xarray as xr

from credit.calendar import Calendar
from credit.config.sections.verification import OtherForecastsConfig
from credit.errors import DataError
from credit.forecast.io.forecast_reader import open_forecasts, open_other_forecasts
from tests.unit.forecast.test_forecast_writer import GRID, INITIAL, LEADS, MASK, NAMES, make_writer, random_fields

CALENDAR = Calendar()


@pytest.mark.parametrize("options", [{}, {"format": "zarr"}, {"format": "zarr", "layout": "weatherbench2"}])
def test_written_forecasts_are_read_back(tmp_path: Path, options: dict) -> None:
    writer = make_writer(tmp_path, **options)
    for seed, text in enumerate(INITIAL):
        writer.write(CALENDAR.parse(text), random_fields(seed))
    writer.close()
    archive = open_forecasts(tmp_path)
    assert archive.initial_minutes.tolist() == [CALENDAR.parse(text) for text in INITIAL]
    assert archive.lead_minutes.tolist() == LEADS
    assert sorted(archive.channel_names) == sorted(NAMES)
    assert archive.units["z"] == "m2 s-2" and archive.calendar == CALENDAR
    assert archive.grid.describe_mismatch(GRID) is None
    assert archive.attributes["checkpoint_step"] == 7
    expected = random_fields(1)
    expected[:, NAMES.index("sst"), MASK] = np.nan
    order = [archive.channel_names.index(name) for name in NAMES]
    read = archive.read(CALENDAR.parse(INITIAL[1]))
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read[:, order], expected)


def test_channels_of_a_store_are_sorted(tmp_path: Path) -> None:
    """A folder lists its variables in any order, but ranks add up scores by the index of a channel."""
    make_writer(tmp_path, format="zarr").write(CALENDAR.parse(INITIAL[0]), random_fields())
    orders = {tuple(open_forecasts(tmp_path).channel_names) for _ in range(20)}
    assert orders == {("sst", "t850", "t500", "t250", "t2m", "tp", "u850", "u500", "u250", "z500")}


def test_incomplete_forecasts_of_a_store_are_ignored(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, format="zarr")
    with pytest.raises(DataError, match="no forecast is complete"):
        open_forecasts(tmp_path)
    writer.write(CALENDAR.parse(INITIAL[1]), random_fields())
    assert open_forecasts(tmp_path).initial_minutes.tolist() == [CALENDAR.parse(INITIAL[1])]


def test_store_with_south_first(tmp_path: Path) -> None:
    """The stores of WeatherBench 2 have this layout: the southernmost row first, and lead times as timedelta."""
    values = np.random.default_rng(3).standard_normal((1, 2, 3, 6, 12)).astype(np.float32)
    dims = ("time", "prediction_timedelta", "level", "latitude", "longitude")
    dataset = xr.Dataset(
        {"z": (dims, values)},
        {
            "time": np.array(["2001-04-01"], dtype="datetime64[ns]"),
            "prediction_timedelta": np.array([6, 12], dtype="timedelta64[h]").astype("timedelta64[ns]"),
            "level": [850, 500, 250],
            "latitude": GRID.lat[::-1],
            "longitude": GRID.lon,
        },
    )
    dataset.to_zarr(tmp_path / "other.zarr", consolidated=False)
    archive = open_forecasts(tmp_path / "other.zarr")
    assert archive.channel_names == ["z850", "z500", "z250"] and archive.lead_minutes.tolist() == [360, 720]
    np.testing.assert_array_equal(archive.read(CALENDAR.parse("2001-04-01")), values[0, :, :, ::-1])


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
@pytest.mark.parametrize("bits", [1, 7, 22, 23])
def test_rounding_keeps_special_values(tmp_path: Path, format: str, bits: int) -> None:
    """Missing values and infinities do not change, and finite numbers of any size in float32 stay finite."""
    largest, smallest = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    special_values = [np.nan, np.inf, -np.inf, 0.0, -0.0, np.finfo(np.float32).smallest_normal]
    fields = random_fields()
    fields[0, 0].flat[:10] = [*special_values, largest, -largest, smallest, 1000 * smallest]
    writer = make_writer(tmp_path, format=format, keep_bits=bits, compression=1)
    writer.write(CALENDAR.parse(INITIAL[0]), fields)
    writer.close()
    archive = open_forecasts(tmp_path)
    read = archive.read(CALENDAR.parse(INITIAL[0]))[0, archive.channel_names.index(NAMES[0])].ravel()
    np.testing.assert_array_equal(read[:6].view(np.uint32), np.array(special_values, dtype=np.float32).view(np.uint32))
    largest_rounded = np.float32(np.ldexp(2.0 - 2.0**-bits, 127))
    np.testing.assert_array_equal(read[6:8], [largest_rounded, -largest_rounded])
    # Rounded subnormal numbers have the same spacing as rounded numbers above the smallest normal one.
    assert np.abs(read[8:10] - fields[0, 0].flat[8:10]).max() <= smallest * 2.0 ** (23 - bits) / 2


def test_files_of_two_runs_are_refused(tmp_path: Path) -> None:
    make_writer(tmp_path).write(CALENDAR.parse(INITIAL[0]), random_fields())
    other = make_writer(tmp_path, global_attributes={"title": "a test", "checkpoint_step": 8})
    other.write(CALENDAR.parse(INITIAL[1]), random_fields())
    with pytest.raises(DataError, match=r"T0030.nc: is of a different run \(global attributes checkpoint_step\)"):
        open_forecasts(tmp_path)
    make_writer(tmp_path / "leads").write(CALENDAR.parse(INITIAL[0]), random_fields())
    make_writer(tmp_path / "leads", lead_minutes=[60, 120, 180]).write(CALENDAR.parse(INITIAL[1]), random_fields())
    with pytest.raises(DataError, match="the lead times of the forecast differ"):
        open_forecasts(tmp_path / "leads")


def test_array_attributes_distinguish_runs(tmp_path: Path) -> None:
    for initial in INITIAL:
        make_writer(tmp_path, global_attributes={"numbers": np.array([1.0, 2.0, 3.0])}).write(
            CALENDAR.parse(initial), random_fields()
        )
    assert open_forecasts(tmp_path).attributes["numbers"] == [1.0, 2.0, 3.0]
    with netCDF4.Dataset(max(tmp_path.glob("*.nc")), "a") as dataset:
        dataset.numbers = np.array([1.0, 2.0, 4.0])
    with pytest.raises(DataError, match=r"is of a different run \(global attributes numbers\)"):
        open_forecasts(tmp_path)


def test_initial_time_without_units_is_refused(tmp_path: Path) -> None:
    make_writer(tmp_path).write(CALENDAR.parse(INITIAL[0]), random_fields())
    (path,) = tmp_path.glob("*.nc")
    with netCDF4.Dataset(path, "a") as dataset:
        dataset["forecast_reference_time"].delncattr("units")
    with pytest.raises(DataError, match=f"{path.name}: forecast_reference_time has no units; set them, for example"):
        open_forecasts(tmp_path)


def test_missing_and_damaged_forecasts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no forecasts; run credit rollout first"):
        open_forecasts(tmp_path)
    (tmp_path / "forecast_2001-04-01T00.nc").write_bytes(b"nothing")
    with pytest.raises(DataError, match="forecast_2001-04-01T00.nc: is not a readable forecast"):
        open_forecasts(tmp_path)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("lead", ["ns", "seconds", "hours", "timedelta"])
def test_store_of_another_program_is_recognised_by_dimensions(tmp_path: Path, zarr_format: int, lead: str) -> None:
    """The store may have any version, order of dimensions, packing and unit of lead times."""
    hours, values = np.array([6, 12, 240]), np.random.default_rng(3).normal(250, 20, (1, 3, 2, 2, 12, 6))
    leads = {
        "ns": ("prediction_timedelta", hours * 3600 * 10**9, {"units": "nanoseconds"}),
        "seconds": ("prediction_timedelta", hours * 3600, {"units": "seconds"}),
        "hours": ("prediction_timedelta", hours, {"units": "hours"}),
        "timedelta": ("prediction_timedelta", hours.astype("timedelta64[h]")),
    }
    order = ("time", "prediction_timedelta", "number", "level", "longitude", "latitude")
    dataset = xr.Dataset(
        {"temperature": (order, values), "t": (order[:2], values[:, :, 0, 0, 0, 0]), "q": (order, values)},
        {
            "time": np.array(["2001-04-01"], dtype="datetime64[ns]"),
            "prediction_timedelta": leads[lead],
            "number": [0, 1],
            "level": [500, 850],
            "latitude": GRID.lat[::-1],
            "longitude": GRID.lon,
        },
    )
    dataset["temperature"] = dataset["temperature"].transpose("latitude", "number", "time", ..., "longitude")
    dataset["temperature"].encoding = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 250.0, "_FillValue": -1}
    dataset.to_zarr(tmp_path / "other.zarr", zarr_format=zarr_format, consolidated=zarr_format == 2)
    archive = open_forecasts(tmp_path / "other.zarr", {"t": "temperature"})
    assert archive.channel_names == ["q500", "q850", "t500", "t850"] and archive.members == 2
    assert archive.lead_minutes.tolist() == [360, 720, 14400]
    for number in range(3):
        read = archive.read_members(CALENDAR.parse("2001-04-01"), number)
        expected = values[0, number].swapaxes(-1, -2)[..., ::-1, :]
        np.testing.assert_array_equal(read[:, :2], expected.astype(np.float32))
        np.testing.assert_allclose(read[:, 2:], expected, atol=0.0051, rtol=0)


def test_message_names_the_variable_of_a_damaged_chunk(tmp_path: Path) -> None:
    dims, values = (
        ("time", "prediction_timedelta", "latitude", "longitude"),
        np.random.default_rng(3).random((1, 1, 6, 12)),
    )
    coords = {
        "time": np.array(["2001-04-01"], dtype="datetime64[ns]"),
        "prediction_timedelta": ("prediction_timedelta", [6], {"units": "hours"}),
        "latitude": GRID.lat,
        "longitude": GRID.lon,
    }
    xr.Dataset({"2t": (dims, values)}, coords).to_zarr(tmp_path / "other.zarr", zarr_format=2)
    (tmp_path / "other.zarr" / "2t" / "0.0.0.0").write_bytes(b"no chunk")
    archive = open_forecasts(tmp_path / "other.zarr", {"t2m": "2t"})
    with pytest.raises(DataError, match=r"other.zarr: 2t cannot be read"):
        archive.read(CALENDAR.parse("2001-04-01"))


def test_unreadable_variables_and_stores_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    coords = {
        "time": np.array(["2001-04-01"], dtype="datetime64[ns]"),
        "prediction_timedelta": np.array([6], dtype="timedelta64[h]").astype("timedelta64[ns]"),
        "latitude": GRID.lat,
        "longitude": GRID.lon,
        "quantile": [0.1, 0.9],
    }
    dims = ("time", "prediction_timedelta", "quantile", "latitude", "longitude")
    store = tmp_path / "other.zarr"
    dataset = xr.Dataset({"t2q": (dims, np.ones((1, 1, 2, 6, 12), dtype=np.float32))}, coords)
    dataset.to_zarr(store, consolidated=False)
    with pytest.raises(DataError, match="other.zarr: no variable has the dimensions time, prediction_timedelta"):
        open_forecasts(store)
    assert "t2q has the dimensions time, prediction_timedelta, quantile" in caplog.text
    for renamed, problem in (("t2q", "t2q has the dimensions .*select one index"), ("t2", 'variable t2 .*mean "t2q"')):
        with pytest.raises(DataError, match=f"verification.other_forecasts.pangu: .*other.zarr: .*{problem}"):
            open_other_forecasts("pangu", OtherForecastsConfig(path=str(store), rename={"t2m": renamed}), "hPa")
    with pytest.raises(DataError, match=r"other_forecasts.pangu: .*nowhere: does not exist"):
        open_other_forecasts("pangu", OtherForecastsConfig.model_validate(str(tmp_path / "nowhere")), "hPa")
    (store / "t2q" / "zarr.json").write_text("{")
    with pytest.raises(DataError, match="other.zarr: cannot be read as zarr"):
        open_forecasts(store)


def write_foreign_store(
    path: str | Path, levels: dict[str, tuple[list[float], dict]], lead: int = 6, **options: object
) -> np.ndarray:
    """Write a store with t2m and, for each dimension in `levels`, a variable named by its first letter; return t2m."""
    values = np.random.default_rng(5).random((1, 1, 6, 12)).astype(np.float32)
    coords: dict[str, object] = {
        "time": np.array(["2001-04-01"], dtype="datetime64[ns]"),
        "prediction_timedelta": ("prediction_timedelta", [6], {"units": "hours"}),
        "latitude": GRID.lat,
        "longitude": GRID.lon,
    }
    fields: dict[str, object] = {"t2m": (tuple(coords), values)}
    for dim, (level_values, attributes) in levels.items():
        fields[dim[0]] = (
            (dim, "time", "prediction_timedelta", "latitude", "longitude"),
            np.stack([values] * len(level_values)),
        )
        coords[dim] = dim, level_values, attributes
    xr.Dataset(fields, coords).to_zarr(path, **{"zarr_format": 2, **options})
    return values


CF_LEVELS = {
    "standard_name": {"standard_name": "air_pressure", "units": "hPa"},
    "axis": {"axis": "Z", "units": "millibar"},
    "positive": {"positive": "Down", "units": "hPa"},
    "nothing else": {"axis": "Z"},
}


@pytest.mark.parametrize("said", CF_LEVELS)
def test_levels_are_recognised_by_cf_attributes(tmp_path: Path, said: str) -> None:
    write_foreign_store(tmp_path / "a.zarr", {"zeta": ([500.0, 850.0], CF_LEVELS[said])})
    archive = open_forecasts(tmp_path / "a.zarr", level_units="hPa")
    assert archive.channel_names == ["t2m", "z500", "z850"]
    fields = archive.read_members(CALENDAR.parse("2001-04-01"), 0)[0]
    np.testing.assert_array_equal(fields[1], fields[0])


def test_levels_are_converted_to_the_units_of_the_data(tmp_path: Path) -> None:
    write_foreign_store(tmp_path / "pa.zarr", {"plev": ([92500.0, 50000.0], {"units": "Pa"})})
    assert open_forecasts(tmp_path / "pa.zarr").channel_names == ["p92500", "p50000", "t2m"]
    other = OtherForecastsConfig(path=str(tmp_path / "pa.zarr"))
    assert open_other_forecasts("x", other, "hPa").channel_names == ["p925", "p500", "t2m"]
    assert open_other_forecasts("x", other, "Pa").channel_names == ["p92500", "p50000", "t2m"]


def test_pressures_are_not_taken_for_model_levels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """10 hPa is not the tenth model level, though both would be called t10."""
    write_foreign_store(tmp_path / "hpa.zarr", {"tlev": ([10.0], {"axis": "Z", "units": "hPa"})})
    write_foreign_store(tmp_path / "number.zarr", {"tlev": ([10.0], {"axis": "Z", "units": "1"})})
    for name, units, reason in (("hpa", "model_level", "tlev is in hPa"), ("number", "hPa", 'tlev is in "1", not in')):
        caplog.clear()
        other = OtherForecastsConfig(path=str(tmp_path / f"{name}.zarr"))
        assert open_other_forecasts("x", other, units).channel_names == ["t2m"]
        assert f"{name}.zarr: t has the dimensions tlev, time" in caplog.text and reason in caplog.text
        with pytest.raises(DataError, match=rf"other_forecasts.x: .*{name}.zarr: t has the dimensions tlev.*rename"):
            open_other_forecasts("x", other.model_copy(update={"rename": {"temperature": "t"}}), units)


def test_message_lists_dimensions_if_none_is_a_level(tmp_path: Path) -> None:
    write_foreign_store(tmp_path / "a.zarr", {"zheight": ([10.0, 80.0], {"units": "m", "positive": "up"})})
    dataset = xr.open_zarr(tmp_path / "a.zarr", decode_timedelta=False).drop_vars("t2m")
    dataset.rename_dims(zheight="level").to_zarr(tmp_path / "b.zarr", zarr_format=2)  # has no coordinate of this name
    dataset.to_zarr(tmp_path / "c.zarr", zarr_format=2)
    with pytest.raises(DataError, match="there are latitude, level, longitude, .*; level has no coordinate"):
        open_forecasts(tmp_path / "b.zarr")
    with pytest.raises(DataError, match=r"there are latitude, .*; zheight is not a level: .*air_pressure"):
        open_forecasts(tmp_path / "c.zarr")


def test_member_dimension_without_coordinate(tmp_path: Path) -> None:
    write_foreign_store(tmp_path / "a.zarr", {"level": ([500.0, 850.0], {})})
    dataset = xr.open_zarr(tmp_path / "a.zarr", decode_timedelta=False).drop_vars("t2m")
    dataset.drop_vars("level").rename_dims(level="member").to_zarr(tmp_path / "b.zarr", zarr_format=2)
    archive = open_forecasts(tmp_path / "b.zarr")
    assert archive.members == 2 and archive.channel_names == ["l"]


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_variables_without_members_are_left_out_of_an_ensemble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    """Otherwise the three levels would be taken for three members."""
    values = np.random.default_rng(5).random((1, 2, 3, 6, 12)).astype(np.float32)
    init, lead = ("forecast_reference_time", "time") if format == "netcdf" else ("time", "prediction_timedelta")
    fields = {
        "t2m": ((init, lead, "number", "latitude", "longitude"), values),
        "z": ((init, lead, "level", "latitude", "longitude"), values),
        "orog": ((init, lead, "latitude", "longitude"), values[:, :, 0]),
    }
    hours = {"units": "hours since 2001-04-01"}
    coords = {
        init: (init, [0], hours), lead: (lead, [6, 12], hours if format == "netcdf" else {"units": "hours"}),
        "level": [500.0, 700.0, 850.0], "latitude": GRID.lat, "longitude": GRID.lon,
    }  # fmt: skip
    dataset = xr.Dataset(fields, coords)
    if format == "netcdf":
        dataset["forecast_period"] = ("time", [6, 12], {"units": "hours"})
        dataset.isel({init: 0}).to_netcdf(tmp_path / "forecast_1.nc")
    else:
        dataset.to_zarr(tmp_path / "forecasts.zarr", zarr_format=2)
    archive = open_forecasts(tmp_path)
    assert archive.channel_names == ["t2m"] and archive.members == 3
    for name in ("z", "orog"):
        assert (
            f"{name} has no dimension number, unlike t2m: it may be a mean or a control; it is skipped" in caplog.text
        )
    np.testing.assert_array_equal(archive.read_members(CALENDAR.parse("2001-04-01"), 1)[:, 0], values[0, 1])
    with pytest.raises(DataError, match="orog has no dimension number, unlike t2m.*repeat this variable along number"):
        open_forecasts(tmp_path, {"ground": "orog"})


def test_warning_about_left_out_variables_appears_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = np.zeros((2, 3, *GRID.shape), dtype=np.float32)
    for day in (1, 2, 3):
        hours = {"units": f"hours since 2001-04-0{day}"}
        cells = ("latitude", "longitude")
        fields = {
            "t2m": (("time", "number", *cells), values),
            "control": (("time", *cells), values[:, 0]),
            "soil": (("time", "depth", *cells), values),
            "forecast_reference_time": ((), 0, hours),
            "forecast_period": (("time",), [6, 12], {"units": "hours"}),
        }
        coords = {"time": ("time", [6, 12], hours), "latitude": GRID.lat, "longitude": GRID.lon}
        xr.Dataset(fields, coords).to_netcdf(tmp_path / f"forecast_{day}.nc")
    assert open_forecasts(tmp_path).channel_names == ["t2m"]
    warnings = [record.getMessage() for record in caplog.records if "it is skipped" in record.getMessage()]
    assert (
        len(warnings) == 2 and "forecast_1.nc: soil has" in warnings[0] and "forecast_1.nc: control has" in warnings[1]
    )


@pytest.mark.parametrize(
    "options", [{"zarr_format": 2, "consolidated": True}, {"zarr_format": 3, "consolidated": False}]
)
def test_store_at_a_url(tmp_path: Path, options: dict) -> None:
    values = write_foreign_store(tmp_path / "a.zarr", {"level": ([500.0], {})}, **options)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "a.zarr"), "/test_archive/a.zarr", recursive=True)
    other = OtherForecastsConfig(path="memory://test_archive/a.zarr", rename={"2t": "t2m"})
    try:
        archive = open_other_forecasts("far", other, "hPa")
        assert archive.channel_names == ["l500", "2t"] and archive.origin == other.path
        fields = archive.read_members(CALENDAR.parse("2001-04-01"), 0)
        np.testing.assert_array_equal(fields[0], np.concatenate([values[0]] * 2))
        local_archive = open_forecasts(tmp_path / "a.zarr", other.rename)
        np.testing.assert_array_equal(local_archive.read_members(CALENDAR.parse("2001-04-01"), 0), fields)
        for name in memory.find("/test_archive/a.zarr/t2m"):
            memory.pipe(name, b"no chunk")
        with pytest.raises(DataError, match=r"memory://test_archive/a.zarr: t2m cannot be read"):
            archive.read_members(CALENDAR.parse("2001-04-01"), 0)
        missing_store = other.model_copy(update={"path": "memory://test_archive/b.zarr"})
        with pytest.raises(DataError, match=r"other_forecasts.far: memory://test_archive/b.zarr: there is no zarr"):
            open_other_forecasts("far", missing_store, "hPa")
    finally:
        memory.rm("/test_archive", recursive=True)
