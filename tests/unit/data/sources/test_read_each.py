"""Tests of reading many times at once: the fields of single reads, in few reads of bounded size."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.data.samples.cached_reader import CachedReader
from credit.data.sources import series, source_reader
from credit.data.sources.source_reader import SourceReader, open_sources
from tests.unit.data import hybrid_on_the_fly
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file
from tests.unit.data.hybrid_on_the_fly import DERIVED, GROUND, fields_of

H, W = 8, 16
HOURS = 48


@pytest.fixture
def reader(tmp_path: Path) -> SourceReader:
    """Open t on levels in two files with a gap, a file of hourly precipitation, and a file with masked cells."""
    t = random_fields(8, 3, H, W)
    write_file(tmp_path / "t_a.nc", {"t": t[:3]}, levels=[250, 500, 850], hours=[6, 12, 18])
    write_file(tmp_path / "t_b.nc", {"t": t[3:]}, levels=[250, 500, 850], hours=[24, 36, 42, 48, 54])
    write_file(tmp_path / "tp.nc", {"tp": random_fields(HOURS, H, W, seed=1)}, hours=range(1, HOURS + 1))
    sst = random_fields(10, H, W, seed=2)
    sst[:, 2:4, 5:9] = np.nan
    write_file(tmp_path / "sst.nc", {"sst": sst}, hours=range(0, 60, 6))
    paths = [tmp_path / name for name in ("t_a.nc", "t_b.nc", "tp.nc", "sst.nc")]
    fields = {"tp": {"temporal": "accumulate"}, "sst": {"missing": "fill_mean"}}
    return open_sources(
        make_config(paths, p3=["t"], p2=["tp", "sst"], levels=[850, 250], variable_options=fields, timestep="6h")
    )


@pytest.mark.parametrize("times_at_once", [1, 3, 1000])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6], [5, 1, 1, 6, 0], []])
def test_read_each_equals_single_reads(
    reader: SourceReader, order: list[int], times_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_reader, "_BYTES_AT_ONCE", times_at_once * reader.bytes_per_time)
    assert len(reader.times) == 7
    expected_fields = [reader.read(index) for index in order]
    for fields_at_once in (reader.read_each(order), CachedReader(reader).read_each(order)):
        for expected_CHW, fields in zip(expected_fields, fields_at_once, strict=True):
            np.testing.assert_array_equal(expected_CHW, fields)
            assert fields.dtype == np.float32


def test_adjacent_times_are_read_at_once(reader: SourceReader, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: dict[str, list[int]] = {"t": [], "tp": [], "sst": []}
    read_file_variable = series.read_file_variable

    def count_reads(files: object, file_variable: object, positions: slice, on_file_grid: bool) -> np.ndarray:
        lengths[file_variable.layout.name].append(positions.stop - positions.start)
        return read_file_variable(files, file_variable, positions, on_file_grid)

    monkeypatch.setattr(series, "read_file_variable", count_reads)
    cached_reader = CachedReader(reader)
    for _ in range(2):
        assert len([*cached_reader.read_each(range(7))]) == 7
    # t: 6, 12, 18 h and 24, 36, 42, 48 h. tp: hours 1 to 24 and 31 to 48. sst: 6 to 24 h and 36 to 48 h.
    assert lengths == {"t": [3, 4], "tp": [24, 18], "sst": [4, 3]}


def open_chunked_reader(folder: Path, step: int, rows: int = H, packed: bool = False) -> SourceReader:
    """Open hourly temperature in chunks of 12 hours, and pressure at the time step of the run, `step` hours."""
    for name, hours in (("t2m", range(HOURS)), ("msl", range(0, HOURS, step))):
        fields = random_fields(len(hours), rows, W, seed=len(name))
        packing = {"dtype": "i2", "scale_factor": 0.01, "_FillValue": -999} if packed else {}
        xr.Dataset(
            {name: (("time", "lat", "lon"), fields, {"units": "K" if name == "t2m" else "1"})},
            {
                "time": ("time", list(hours), {"units": "hours since 2000-01-01"}),
                "lat": ("lat", 90 - 180 / rows * (np.arange(rows) + 0.5), {"units": "degrees_north"}),
                "lon": ("lon", np.arange(W) * 360 / W, {"units": "degrees_east"}),
            },
        ).to_netcdf(folder / f"{name}.nc", encoding={name: {"chunksizes": (min(12, len(hours)), rows, W)} | packing})
    return open_sources(make_config([folder / "t2m.nc", folder / "msl.nc"], p2=["t2m", "msl"], timestep=f"{step}h"))


def test_gap_does_not_change_times_per_chunk(tmp_path: Path) -> None:
    """One file has two periods of six-hourly fields, a year apart, in chunks of 8 times."""
    hours = [*range(0, 120, 6), *range(8760, 8880, 6)]
    fields = {"t2m": random_fields(len(hours), H, W)}
    write_file(tmp_path / "a.nc", fields, hours)
    with xr.open_dataset(tmp_path / "a.nc", decode_times=False) as dataset:
        dataset.to_netcdf(tmp_path / "b.nc", encoding={"t2m": {"chunksizes": (8, H, W)}})
    reader = open_sources(make_config(tmp_path / "b.nc", p2=["t2m"], timestep="6h"))
    assert len(reader.times) == 40
    assert reader.times_per_chunk == 8


@pytest.mark.parametrize(("step", "expected"), [(1, 12), (6, 8)])
def test_chunk_is_read_once_for_any_time_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, expected: int
) -> None:
    reader = open_chunked_reader(tmp_path, step)
    expected_fields = [reader.read(index) for index in range(len(reader.times))]
    read_lengths: list[int] = []
    read_file_variable = series.read_file_variable

    def count_reads(files: object, file_variable: object, positions: slice, on_file_grid: bool) -> np.ndarray:
        read_lengths.extend([positions.stop - positions.start] * (file_variable.layout.name == "t2m"))
        return read_file_variable(files, file_variable, positions, on_file_grid)

    monkeypatch.setattr(series, "read_file_variable", count_reads)
    monkeypatch.setattr(source_reader, "_BYTES_AT_ONCE", 0)
    for expected_CHW, fields in zip(
        expected_fields, reader.read_each(range(len(expected_fields)), 100 * reader.bytes_per_time), strict=True
    ):
        np.testing.assert_array_equal(expected_CHW, fields)
    assert len(read_lengths) == HOURS // 12
    assert reader.times_per_chunk == expected


@pytest.mark.parametrize(("packed", "step"), [(False, 1), (True, 1), (True, 6)])
def test_memory_is_close_to_its_estimate(tmp_path: Path, packed: bool, step: int) -> None:
    """The estimate includes the times between those of the run, because a chunk contains them."""
    reader = open_chunked_reader(tmp_path, step, 20 * H, packed)
    times = range(min(36, len(reader.times)))
    [*reader.read_each(times[:12], 12 * reader.bytes_per_time)]
    tracemalloc.start()
    fields = reader._read_variables(times, set(reader._series))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(field.nbytes for field in fields) < peak < 1.3 * len(times) * reader.bytes_per_time


def open_hybrid_reader(folder: Path, levels_a_chunk: int) -> SourceReader:
    """Open interpolated and derived variables of packed columns in chunks of 12 times and `levels_a_chunk` levels."""
    path = hybrid_on_the_fly.write(folder / "plain.nc", "ecmwf", fields_of("t", "u", "v", "q", "lnsp", "zs"))
    with xr.open_dataset(path, decode_times=False) as data:
        encoding = {name: {"_FillValue": None} for name in data.variables}
        for name in ("t", "u", "v", "q"):
            shape = (12, levels_a_chunk, hybrid_on_the_fly.H, hybrid_on_the_fly.W)
            low = float(data[name].min())
            high = float(data[name].max())
            packing = {"scale_factor": (high - low) / 6e4, "add_offset": 0.5 * (low + high), "_FillValue": -32768}
            encoding[name] = {"dtype": "i2", "chunksizes": shape} | packing
        encoding["lnsp"] = {"chunksizes": (12, *shape[2:])}
        data.to_netcdf(folder / "chunks.nc", encoding=encoding)
    ground = GROUND | {"surface_pressure": "lnsp"}
    options = {
        "p3": ["t", "q", "z", "ws"],
        "p2": ["msl"],
        "variable_options": {n: DERIVED[n] for n in ("z", "ws", "msl")},
    }
    return open_sources(hybrid_on_the_fly.config(folder / "chunks.nc", ground, **options))


@pytest.mark.parametrize("levels_a_chunk", [1, hybrid_on_the_fly.K])
def test_inputs_of_derived_variables_are_read_by_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, levels_a_chunk: int
) -> None:
    """Fields do not depend on the size of a read. A chunk of an input is read once per variable computed from it."""
    reader = open_hybrid_reader(tmp_path, levels_a_chunk)
    monkeypatch.setattr(source_reader, "_BYTES_AT_ONCE", 0)
    expected_fields = [*reader.read_each(range(40), 0)]
    reads: list[tuple[str, int]] = []
    read_file_variable = series.read_file_variable

    def count_reads(files: object, file_variable: object, position: slice, on_file_grid: bool) -> np.ndarray:
        reads.append((file_variable.layout.name, position.stop - position.start))
        return read_file_variable(files, file_variable, position, on_file_grid)

    monkeypatch.setattr(series, "read_file_variable", count_reads)
    assert reader.times_per_chunk == 12
    for expected_CHW, fields in zip(
        expected_fields, reader.read_each(range(40), 12 * reader.bytes_per_time), strict=True
    ):
        np.testing.assert_array_equal(expected_CHW, fields)
    times_of_variable = defaultdict(list)
    for name, times in reads:
        times_of_variable[name].append(times)
    # t is read for t, z and msl. q is read for q and z. lnsp is read for all five variables.
    passes = {"t": 3, "q": 2, "u": 1, "v": 1, "lnsp": 5}
    assert times_of_variable.keys() == passes.keys()
    # Each pass over the 40 times reads three whole chunks of 12 and a last one of 4.
    for name, count in passes.items():
        assert sorted(times_of_variable[name]) == [4] * count + [12] * 3 * count, name


def test_memory_of_derived_variables_is_close_to_its_estimate(tmp_path: Path) -> None:
    reader = open_hybrid_reader(tmp_path, hybrid_on_the_fly.K)
    [*reader.read_each(range(12), 12 * reader.bytes_per_time)]
    tracemalloc.start()
    fields = reader._read_variables(range(36), set(reader._series))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(field.nbytes for field in fields) < peak < 1.3 * 36 * reader.bytes_per_time


def test_times_may_descend_in_a_file(tmp_path: Path) -> None:
    """This includes chunks of several times, which are read at once."""
    expected = [*open_chunked_reader(tmp_path, step=1).read_each(range(HOURS))]
    for name in ("t2m", "msl"):
        with xr.open_dataset(tmp_path / f"{name}.nc", decode_times=False) as dataset:
            descending = dataset.isel(time=slice(None, None, -1)).load()
        encoding = {name: {"chunksizes": (12, H, W)}}
        descending.to_netcdf(tmp_path / f"{name}_descending.nc", encoding=encoding)
    paths = [tmp_path / f"{name}_descending.nc" for name in ("t2m", "msl")]
    reader = open_sources(make_config(paths, p2=["t2m", "msl"], timestep="1h"))
    np.testing.assert_array_equal([*reader.read_each(range(HOURS))], expected)
