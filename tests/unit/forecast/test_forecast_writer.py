"""Forecast writer: content of files and stores as xarray and CDO read it, and behaviour after failures."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr

from credit import __version__
from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.errors import ConfigError, CreditError, DataError
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.schema import OutputFields, OutputOptions
from credit.forecast.io.zarr_store import STORE
from credit.utils.bitround import bitround
from tests.unit.analytic_reader import ATTRIBUTES, make_grid

CHANNELS = ChannelMap.build(
    {
        "prognostic": {"vars_3D": ["t", "u", "z"], "vars_2D": ["t2m", "sst"]},
        "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]},
    },
    [850.0, 500.0, 250.0],
    {"z": [500.0]},
    ["sst"],
)
NAMES = [channel.name for channel in CHANNELS.output]
GRID = make_grid(6, 12)
LEADS = [360, 720, 1440]
INITIAL = ["2001-04-01T00:00", "2001-04-02T00:30"]
MASK = np.arange(72).reshape(6, 12) == 17


def random_fields(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((len(LEADS), len(NAMES), *GRID.shape)).astype(np.float32)


def make_writer(folder: Path, calendar: Calendar | None = None, **options: object) -> ForecastWriter:
    """Open a writer; options are those of `OutputFields`, of `OutputOptions` or of the writer itself."""
    calendar = calendar or Calendar()
    masks = options.pop("masks", {"sst": MASK})
    windows = options.pop("windows", {})
    attributes = ATTRIBUTES | options.pop("attributes", {})
    fields = OutputFields(CHANNELS, GRID, calendar, attributes, 360, masks=masks, windows=windows)
    lead_minutes = options.pop("lead_minutes", LEADS)
    initial_minutes = options.pop("initial_minutes", [calendar.parse(text) for text in INITIAL])
    writer_options = {"global_attributes": {"title": "a test", "checkpoint_step": 7}}
    for name in ("members", "global_attributes", "initial_state_checksum"):
        if name in options:
            writer_options[name] = options.pop(name)
    return ForecastWriter(folder, fields, lead_minutes, initial_minutes, OutputOptions(**options), **writer_options)


def test_a_netcdf_file_is_named_and_described(tmp_path: Path) -> None:
    writer, fields = make_writer(tmp_path), random_fields()
    paths = [writer.write(Calendar().parse(text), fields) for text in INITIAL]
    assert [path.name for path in paths] == ["forecast_2001-04-01T00.nc", "forecast_2001-04-02T0030.nc"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in paths]
    with xr.open_dataset(paths[0]) as dataset:
        expected = np.array(["2001-04-01T06:00", "2001-04-01T12:00", "2001-04-02T00:00"], dtype="datetime64[ns]")
        np.testing.assert_array_equal(dataset["time"], expected)
        assert dataset["forecast_reference_time"].values == np.datetime64("2001-04-01T00:00")
        np.testing.assert_array_equal(dataset["forecast_period"], [6.0, 12.0, 24.0])
        assert dataset["forecast_period"].attrs["standard_name"] == "forecast_period"
        assert dataset["time"].attrs["standard_name"] == "time"
        assert dataset["t"].dims == ("time", "level", "latitude", "longitude")
        assert dataset["z"].dims == ("time", "level_z", "latitude", "longitude")
        for name in ("level", "level_z"):
            described = {"standard_name": "air_pressure", "units": "hPa", "positive": "down", "axis": "Z"}
            assert described.items() <= dataset[name].attrs.items()
        assert dataset["latitude"].attrs["standard_name"] == "latitude"
        assert dataset["t2m"].attrs["units"] == "K" and dataset["t2m"].attrs["standard_name"] == "air_temperature"
        np.testing.assert_array_equal(dataset["t"].sel(level=500.0), fields[:, NAMES.index("t500")])
        np.testing.assert_array_equal(dataset["tp"], fields[:, NAMES.index("tp")])
        assert np.isnan(dataset["sst"].values[:, MASK]).all() and not np.isnan(dataset["sst"].values[:, ~MASK]).any()
        assert dataset.attrs == {
            "Conventions": "CF-1.8", "title": "a test", "checkpoint_step": 7, "lead_minutes": "360, 720, 1440",
            "history": f"credit {__version__}: credit rollout",
        }  # fmt: skip


def test_accumulations_have_bounds_and_cell_methods(tmp_path: Path) -> None:
    path = make_writer(tmp_path).write(Calendar().parse(INITIAL[0]), random_fields())
    with netCDF4.Dataset(path) as dataset:
        assert dataset["tp"].cell_methods == "time: sum" and dataset["t"].cell_methods == "time: point"
        assert dataset["time"].bounds == "time_bnds"
        np.testing.assert_array_equal(dataset["time_bnds"][:, 1], dataset["time"][:])
        np.testing.assert_array_equal(dataset["time_bnds"][:, 1] - dataset["time_bnds"][:, 0], 360.0)
    # If all sums have one other window, it also determines the bounds of the time coordinate.
    path = make_writer(tmp_path / "day", windows={"tp": 1440}).write(Calendar().parse(INITIAL[0]), random_fields())
    with netCDF4.Dataset(path) as dataset:
        np.testing.assert_array_equal(dataset["time_bnds"][:, 1] - dataset["time_bnds"][:, 0], 1440.0)
    path = make_writer(tmp_path / "instant", variables=["t", "t2m"]).write(
        Calendar().parse(INITIAL[0]), random_fields()
    )
    with netCDF4.Dataset(path) as dataset:
        assert "time_bnds" not in dataset.variables and "cell_methods" not in dataset["t"].ncattrs()
        assert "z" not in dataset.variables


@pytest.mark.parametrize("calendar_name", ["noleap", "360_day"])
def test_other_calendars(tmp_path: Path, calendar_name: str) -> None:
    calendar = Calendar(calendar_name)
    initial = calendar.parse("2001-02-28T18:00")
    path = make_writer(tmp_path, calendar, initial_minutes=[initial]).write(initial, random_fields())
    with xr.open_dataset(path, decode_times=xr.coders.CFDatetimeCoder(use_cftime=True)) as dataset:
        second = dataset["time"].values[0]
        assert (second.calendar, second.month, second.day) == (
            calendar_name,
            *((3, 1) if calendar_name == "noleap" else (2, 29)),
        )


@pytest.mark.parametrize("layout", ["cf", "weatherbench2"])
def test_a_zarr_store(tmp_path: Path, layout: str) -> None:
    writer, calendar = make_writer(tmp_path, format="zarr", layout=layout), Calendar()
    second = calendar.parse(INITIAL[1])
    writer.write(second, random_fields(1))
    assert not writer.is_complete(calendar.parse(INITIAL[0])) and writer.is_complete(second)
    init, lead = ("init_time", "lead_time") if layout == "cf" else ("time", "prediction_timedelta")
    with xr.open_zarr(tmp_path / "forecasts.zarr", consolidated=False) as dataset:
        assert dataset["t"].dims == (init, lead, "level", "latitude", "longitude")
        assert dataset["valid_time"].dims == (init, lead)
        assert dataset["valid_time"].values[1, 2] == np.datetime64("2001-04-03T00:30")
        hours = dataset[lead] if layout == "cf" else dataset[lead] / np.timedelta64(1, "h")
        np.testing.assert_array_equal(hours, [6.0, 12.0, 24.0])
        assert dataset[init].attrs["standard_name"] == "forecast_reference_time"
        assert dataset[lead].attrs["standard_name"] == "forecast_period"
        assert dataset["valid_time"].attrs["standard_name"] == "time"
        np.testing.assert_array_equal(
            dataset["u"].isel({init: 1}).sel(level=250.0), random_fields(1)[:, NAMES.index("u250")]
        )
        assert np.isnan(dataset["t2m"].isel({init: 0})).all()
    with xr.open_zarr(tmp_path / "forecasts.zarr", consolidated=False, decode_timedelta=False) as dataset:
        np.testing.assert_array_equal(dataset[lead], [6.0, 12.0, 24.0])


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_complete_forecasts_are_recognised(tmp_path: Path, format: str) -> None:
    first, second = (Calendar().parse(text) for text in INITIAL)
    writer = make_writer(tmp_path, format=format)
    writer.write(first, random_fields())
    writer.close()
    resumed_writer = make_writer(tmp_path, format=format)
    assert resumed_writer.is_complete(first) and not resumed_writer.is_complete(second)


def test_files_of_another_run_are_not_complete(tmp_path: Path) -> None:
    first = Calendar().parse(INITIAL[0])
    make_writer(tmp_path).write(first, random_fields())
    assert not make_writer(tmp_path, global_attributes={"title": "a test", "checkpoint_step": 8}).is_complete(first)
    assert not make_writer(tmp_path, lead_minutes=[360, 720, 1080]).is_complete(first)
    (tmp_path / "forecast_2001-04-01T00.nc").write_bytes(b"CDF is not here")
    assert not make_writer(tmp_path).is_complete(first)
    make_writer(tmp_path / "store", format="zarr")
    with pytest.raises(ConfigError, match="in global attribute checkpoint_step, global attribute title; .*folder"):
        make_writer(tmp_path / "store", format="zarr", global_attributes={"title": "other"})


def test_selected_levels(tmp_path: Path) -> None:
    fields = random_fields()
    path = make_writer(tmp_path, levels=[500], variables=["t", "t2m"]).write(Calendar().parse(INITIAL[0]), fields)
    with xr.open_dataset(path) as dataset:
        assert set(dataset.data_vars) - {"latitude_bnds"} == {"t", "t2m"}
        np.testing.assert_array_equal(dataset["t"].sel(level=500.0), fields[:, NAMES.index("t500")])
        assert dataset["t"].sizes["level"] == 1
    with pytest.raises(ConfigError, match=r"inference.levels: 501: no output is on this level; the levels are .*500"):
        make_writer(tmp_path, levels=[500, 501])


def test_folder_with_another_format_is_refused(tmp_path: Path) -> None:
    make_writer(tmp_path / "files").write(Calendar().parse(INITIAL[0]), random_fields())
    message = r"inference.format: zarr does not match .*forecast_2001-04-01T00.nc, which .* different inference.folder"
    with pytest.raises(ConfigError, match=message):
        make_writer(tmp_path / "files", format="zarr")
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["forecast_2001-04-01T00.nc"]
    make_writer(tmp_path / "store", format="zarr").close()
    with pytest.raises(ConfigError, match=r"inference.format: netcdf does not match .*forecasts.zarr, which"):
        make_writer(tmp_path / "store")
    make_writer(tmp_path / "store", format="zarr").close()


@pytest.mark.parametrize(
    ("split", "names"),
    [("day", ["2001-04-01", "2001-04-02"]), ("month", ["2001-04"]), ("lead", ["006h", "012h", "024h"])],
)
def test_a_forecast_in_several_files(tmp_path: Path, split: str, names: list[str]) -> None:
    first, second = (Calendar().parse(text) for text in INITIAL)
    writer = make_writer(tmp_path, split=split)
    for seed, initial in enumerate((first, second)):
        writer.write(initial, random_fields(seed))
    assert [path.name for path in sorted(tmp_path.glob("*04-01T00_*"))] == [
        f"forecast_2001-04-01T00_{name}.nc" for name in names
    ]
    archive = open_forecasts(tmp_path)
    assert archive.lead_minutes.tolist() == LEADS
    assert make_writer(tmp_path, split=split).is_complete(second)
    other = "day" if split == "lead" else None
    with pytest.raises(ConfigError, match=rf"inference.split: .* a run with {split} has written; .*folder"):
        make_writer(tmp_path, split=other)
    t500 = archive.channel_names.index("t500")
    np.testing.assert_array_equal(archive.read(second)[:, t500], random_fields(1)[:, NAMES.index("t500")])
    if split != "month":
        next(tmp_path.glob("*04-02T0030_*")).unlink()
        assert not make_writer(tmp_path, split=split).is_complete(second)
        with pytest.raises(DataError, match=r"04-02T0030.* of 3 lead times .first missing: .*credit rollout again"):
            open_forecasts(tmp_path)


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_rounded_mantissas_compress(tmp_path: Path, format: str) -> None:
    fields, initial = random_fields(), Calendar().parse(INITIAL[0])
    sizes = {}
    for bits in (23, 7):
        writer = make_writer(tmp_path / str(bits), format=format, keep_bits=bits, compression=5)
        writer.write(initial, fields)
        forecasts = open_forecasts(tmp_path / str(bits))
        t500 = forecasts.read(initial)[:, forecasts.channel_names.index("t500")]
        error = np.abs(t500 / fields[:, NAMES.index("t500")] - 1).max()
        assert error == 0 if bits == 23 else 2**-10 < error <= 2**-8
        files = [path for path in (tmp_path / str(bits)).rglob("*") if path.is_file()]
        sizes[bits] = sum(path.stat().st_size for path in files)
    assert sizes[7] < sizes[23]


def test_rounding_is_to_the_nearest() -> None:
    """Compare with double precision, with ties to even; NaN, infinities and zero do not change."""
    values = np.random.default_rng(3).normal(0, 1e3, 1000).astype(np.float32)
    mantissa, exponent = np.frexp(values.astype(np.float64))
    expected = np.ldexp(np.rint(mantissa * 2**8), exponent - 8)
    np.testing.assert_array_equal(bitround(values, 7), expected.astype(np.float32))
    special = np.array([np.nan, np.inf, -np.inf, 0.0], dtype=np.float32)
    special = np.append(special, np.array([0x7FFFFFFF], dtype=np.uint32).view(np.float32))
    np.testing.assert_array_equal(bitround(special, 5), special)


def test_an_unknown_variable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='inference.variables: "t2n" is not an output; did you mean "t2m"'):
        make_writer(tmp_path, variables=["t2n"])


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_full_disk_leaves_no_incomplete_file(tmp_path: Path, format: str) -> None:
    """With a limit on the size of files, a write fails as on a full disk."""
    first, second = (Calendar().parse(text) for text in INITIAL)
    writer = make_writer(tmp_path, format=format)
    writer.write(first, random_fields())
    before = sorted(tmp_path.iterdir())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))
        with pytest.raises(CreditError, match=r"forecast.*cannot be written \(.*full"):
            writer.write(second, random_fields())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sorted(tmp_path.iterdir()) == before
    assert writer.is_complete(first) and not writer.is_complete(second)
    writer.write(second, random_fields())
    assert writer.is_complete(second)


@pytest.mark.parametrize("split", [None, "lead"])
def test_message_for_a_read_only_file_system_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str | None
) -> None:
    """Such a file system also refuses to remove a file, whether the file exists or not."""

    def raise_read_only(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    writer, first = make_writer(tmp_path, split=split), Calendar().parse(INITIAL[0])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", raise_read_only)
        patched.setattr(netCDF4, "Dataset", raise_read_only)
        with pytest.raises(
            CreditError, match=r"forecast_2001-04-01T00\S*\.nc: cannot be written \(Read-only file system\)"
        ):
            writer.put(first, 0, random_fields()[0])
        writer.close()


def test_history_does_not_distinguish_runs(tmp_path: Path) -> None:
    """Another version can continue existing forecasts, and a file to whose history a tool has added is still valid."""
    first, second = (Calendar().parse(text) for text in INITIAL)
    writer = make_writer(tmp_path)
    paths = [writer.write(initial, random_fields()) for initial in (first, second)]
    expected_bytes = paths[0].read_bytes()
    with netCDF4.Dataset(paths[0], "a") as dataset:
        assert dataset.history == f"credit {__version__}: credit rollout"
        dataset.history = "Mon Nov 23 2026: a tool\n" + dataset.history
    with netCDF4.Dataset(paths[1], "a") as dataset:
        del dataset.history  # as in files of an earlier version
    assert writer.is_complete(first) and writer.is_complete(second)
    archive = open_forecasts(tmp_path)
    assert len(archive.initial_minutes) == 2 and "history" not in archive.attributes
    assert writer.write(first, random_fields()).read_bytes() == expected_bytes


def test_netcdf_file_is_not_prefilled(tmp_path: Path) -> None:
    """The file grows with its steps. Missing cells have the fill value, and other cells have their values."""
    leads = list(range(360, 360 * 201, 360))
    writer, fields, first = make_writer(tmp_path, lead_minutes=leads), random_fields()[0], Calendar().parse(INITIAL[0])
    sizes = []
    for number in range(len(leads)):
        writer.put(first, number, fields)
        sizes += [512 * path.stat().st_blocks for path in tmp_path.iterdir()]
    assert sizes[0] < sizes[-1] / 4
    with netCDF4.Dataset(next(tmp_path.iterdir())) as dataset:
        assert dataset["sst"]._FillValue == netCDF4.default_fillvals["f4"]
        np.testing.assert_array_equal(dataset["sst"][:].mask, np.broadcast_to(MASK, (len(leads), *MASK.shape)))
        np.testing.assert_array_equal(dataset["t"][:].filled(np.nan), np.tile(fields[:3], (len(leads), 1, 1, 1)))


@pytest.mark.parametrize("members", [None, 2])
def test_writeback_of_chunks_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: int | None) -> None:
    written_back_paths: list[Path] = []
    monkeypatch.setattr("credit.forecast.io.zarr_store.start_writeback", written_back_paths.append)
    writer, fields = make_writer(tmp_path, format="zarr", members=members), random_fields()
    for number in range(2):
        writer.put(Calendar().parse(INITIAL[0]), number, fields[number])
    variables = {channel.variable for channel in CHANNELS.output}
    chunks = {path for name in variables for path in (tmp_path / STORE / name / "c").rglob("*") if path.is_file()}
    twice = {path for path in chunks if written_back_paths.count(path) == 2}
    # Writeback starts when a chunk is written, and again at the next lead time to free the page cache.
    assert {*written_back_paths} == chunks and len(written_back_paths) == len(chunks) + len(twice) == 3 * len(variables)
    assert {path.relative_to(tmp_path).parts[3:5] for path in twice} == {("0", "0")}


def test_step_written_twice_counts_once(tmp_path: Path) -> None:
    writer, fields, first = make_writer(tmp_path), random_fields(), Calendar().parse(INITIAL[0])
    for _ in fields:
        writer.put(first, 0, fields[0])
    assert not writer.is_complete(first)
    assert [path.name.partition(".nc")[2][:6] for path in tmp_path.iterdir()] == [".part."]
    for number in range(1, len(fields)):
        writer.put(first, number, fields[number])
    assert writer.is_complete(first)


def test_interruption_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    writer = make_writer(tmp_path)
    monkeypatch.setattr("credit.forecast.io.files.netcdf.define_variable", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.write(Calendar().parse(INITIAL[0]), random_fields())
    assert not list(tmp_path.iterdir())


def test_message_for_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"^inference.folder: .*file/forecasts cannot be created .*; choose a different"
    ):
        make_writer(tmp_path / "file" / "forecasts")


@pytest.mark.skipif(shutil.which("cdo") is None, reason="CDO is not installed")
def test_cdo_reads_times_levels_and_values(tmp_path: Path) -> None:
    fields = random_fields()
    path = make_writer(tmp_path).write(Calendar().parse(INITIAL[0]), fields)

    def run_cdo(*arguments: str) -> list[str]:
        process = subprocess.run(["cdo", "-s", *arguments, str(path)], capture_output=True, text=True, check=True)
        return process.stdout.split()

    assert run_cdo("showtimestamp") == ["2001-04-01T06:00:00", "2001-04-01T12:00:00", "2001-04-02T00:00:00"]
    assert run_cdo("showlevel", "-selname,t") == ["850", "500", "250"]
    largest = float(run_cdo("output", "-fldmax", "-selname,t2m", "-seltimestep,1")[0])
    assert largest == pytest.approx(fields[0, NAMES.index("t2m")].max(), rel=1e-4)
