"""Tests of the store writer: the same bytes with any number of processes, any order of parts, and after kills."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import distributed
import numpy as np
import pytest
import xarray as xr
import zarr

from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.data.reader import open_reader
from credit.data.sources import series
from credit.data.sources.source_reader import open_sources
from credit.data.splits import build_splits
from credit.data.store import store_creation, store_writer
from credit.data.store.executor import run_on_dask
from credit.data.store.preprocess import write_training_store
from credit.data.store.statistics import fit_statistics
from credit.data.store.store_creation import create_store
from credit.data.store.store_reader import StoreReader, open_store
from credit.errors import ConfigError, DataError

TIMES, ROWS, COLUMNS, LENGTH = 60, 8, 16, 8


def write_files(folder: Path, cell_values: dict[int, float] | None = None) -> None:
    """Write 15 days in three files. `cell_values` maps the index of a time to the value of one cell."""
    rng = np.random.default_rng(3)
    t2m = (280 + np.cumsum(rng.normal(0, 1, (TIMES, ROWS, COLUMNS)), axis=0)).astype(np.float32)
    for index, value in (cell_values or {}).items():
        t2m[index, 2, 3] = value
    times = np.arange(TIMES) * 6.0
    coords = {
        "time": ("time", times, {"units": "hours since 2000-01-01", "standard_name": "time"}),
        "latitude": ("latitude", 90 - 180 / ROWS * (np.arange(ROWS) + 0.5), {"units": "degrees_north"}),
        "longitude": ("longitude", np.arange(COLUMNS) * 360 / COLUMNS, {"units": "degrees_east"}),
    }
    dataset = xr.Dataset({"t2m": (("time", "latitude", "longitude"), t2m, {"units": "K"})}, coords)
    for number in range(3):
        dataset.isel(time=slice(number * 20, (number + 1) * 20)).to_netcdf(folder / f"t2m_{number}.nc")


def make_conf(folder: Path, name: str = "store.zarr", **changes: object) -> DataConfig:
    settings = {
        "sources": [{"path": str(folder / "t2m_*.nc")}],
        "variables": {"prognostic": {"vars_2D": ["t2m"]}},
        "splits": {"train": ["2000-01-02", "2000-01-09"], "valid": ["2000-01-11"] * 2, "test": ["2000-01-13"] * 2},
        "split_gap": "1d",
        "store": str(folder / name),
    }
    return DataConfig.model_validate({**settings, **changes})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(tmp_path)
    monkeypatch.setattr(store_writer, "_MAX_PART_TIMES", LENGTH)
    return tmp_path


def read_files(store: str) -> dict[str, bytes]:
    root = Path(store)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def have_equal_files(store: str, other_store: str) -> bool:
    return read_files(store) == read_files(other_store)


def test_store_does_not_depend_on_order_and_number_of_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serial_conf, parallel_conf, shuffled_conf = (
        make_conf(folder, f"{name}.zarr") for name in ("alone", "many", "shuffled")
    )
    write_training_store(serial_conf)
    write_training_store(parallel_conf, PreprocessConfig(workers=3))
    list_parts = store_writer.list_pending_parts
    monkeypatch.setattr(
        store_writer,
        "list_pending_parts",
        lambda *args: random.Random(1).sample(list_parts(*args), len(list_parts(*args))),
    )
    write_training_store(shuffled_conf)
    assert have_equal_files(serial_conf.store, parallel_conf.store)
    assert have_equal_files(serial_conf.store, shuffled_conf.store)
    reader = open_reader(serial_conf)
    sources = open_sources(serial_conf)
    first = reader.calendar.parse("2000-01-02")
    last = reader.calendar.parse_period_end("2000-01-09")
    assert reader.statistics.to_dict() == fit_statistics(sources, first, last, 360).to_dict(), "to the last bit"
    assert not store_writer.build_lock_folder_path(Path(serial_conf.store)).exists()
    group = zarr.open_group(serial_conf.store, mode="r")
    assert [int(d) for d in group["digest"][:]] == [
        store_writer.hash_fields(reader.read(n), "crc32c") for n in range(len(reader.times))
    ]


@pytest.mark.parametrize(
    ("chunk", "held_times", "reads"),
    [(20, 60, [16, 4, 16, 4, 8]), (5, 60, [8, 8, 8, 8, 4, 4, 8]), (20, 6, [8, 8, 8, 8, 4, 4, 8])],
)
def test_chunks_of_the_sources_are_read_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, held_times: int, reads: list[int]
) -> None:
    for path in folder.glob("*.nc"):
        dataset = xr.load_dataset(path, decode_times=False)
        dataset.to_netcdf(path, encoding={"t2m": {"chunksizes": (chunk, ROWS, COLUMNS)}})
    # The store starts at the fifth time. A read ends at the end of a file of 20 times.
    lengths: list[int] = []
    read_file_variable = series.read_file_variable
    conf = make_conf(folder)

    def count_reads(files: object, file_variable: object, position: slice, on_file_grid: bool) -> np.ndarray:
        lengths.append(position.stop - position.start)
        return read_file_variable(files, file_variable, position, on_file_grid)

    monkeypatch.setattr(series, "read_file_variable", count_reads)
    memory_bytes = held_times * open_sources(conf).bytes_per_time
    write_training_store(conf, PreprocessConfig(memory_gib=(memory_bytes + 1) / 2**30))
    monkeypatch.undo()
    assert [n for n in lengths if n > 1] == reads
    reader = open_reader(conf)
    sources = open_sources(conf)
    for number, minutes in enumerate(reader.times.tolist()):
        np.testing.assert_array_equal(reader.read(number), sources.read(sources.index_of(minutes)))


@pytest.mark.parametrize("compression", store_creation._COMPRESSORS)
def test_a_chunk_has_the_bytes_that_zarr_writes(folder: Path, compression: str) -> None:
    conf = make_conf(folder)
    write_training_store(conf, PreprocessConfig(compression=compression))
    file = Path(conf.store) / "fields/c/7/0/0/0"
    fields = zarr.open_group(conf.store, mode="r+")["fields"]
    values = np.random.default_rng(0).normal(280.0, 20.0, (1, ROWS, COLUMNS)).astype(np.float32)
    fields[7] = values
    written_by_zarr = file.read_bytes()
    file.unlink()
    store_writer.write_chunk(fields, file, values)
    assert file.read_bytes() == written_by_zarr
    assert [path.name for path in file.parent.iterdir()] == ["0"]


def test_stores_of_earlier_versions_keep_their_checksums(folder: Path) -> None:
    conf = make_conf(folder)
    write_training_store(conf)
    digest = zarr.open_group(conf.store, mode="r+")["digest"]
    assert store_writer.read_digest_algorithm(digest) == "crc32c"
    del digest.attrs["algorithm"]
    assert store_writer.read_digest_algorithm(digest) == "blake2b"
    values = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    expected = hashlib.blake2b(values.tobytes(), digest_size=8).digest()
    assert store_writer.hash_fields(values, "blake2b") == int.from_bytes(expected, "little")
    # The CRC32C of 32 zero bytes is in RFC 3720.
    assert store_writer.hash_fields(np.zeros(8, np.float32), "crc32c") == 2**32 + 0x8A9136AA


def test_statistics_equal_numpy(folder: Path) -> None:
    conf = make_conf(folder, transforms={"t2m": {"kind": "log1p", "unit": 10.0}})
    write_training_store(conf)
    reader = open_reader(conf)
    inside = (reader.times >= reader.calendar.parse("2000-01-02")) & (
        reader.times <= reader.calendar.parse_period_end("2000-01-09")
    )
    values = np.stack([reader.read(int(n))[0] for n in np.flatnonzero(inside)])
    logs = np.log1p(values / np.float32(10)).astype(np.float64)
    assert reader.statistics.mean[0] == pytest.approx(logs.mean(), rel=1e-6)
    assert reader.statistics.std[0] == pytest.approx(logs.std(), rel=1e-4)
    assert reader.statistics.tendency_std[0] == pytest.approx(np.diff(logs, axis=0).std(), rel=1e-4)


def test_another_training_period_reads_no_field(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_training_store(make_conf(folder))
    splits = {"train": ["2000-01-03", "2000-01-07"], "valid": ["2000-01-11"] * 2, "test": ["2000-01-13"] * 2}
    # With valid on the first day, the splits extend over the same times as before.
    splits["valid"] = ["2000-01-02", "2000-01-02"]
    monkeypatch.setattr(StoreReader, "read", None)
    other_conf = make_conf(folder, splits=splits, split_gap="1min")
    write_training_store(other_conf)
    monkeypatch.undo()
    reader = open_reader(other_conf)
    sources = open_sources(other_conf)
    first = reader.calendar.parse("2000-01-03")
    last = reader.calendar.parse_period_end("2000-01-07")
    assert reader.statistics.to_dict() == fit_statistics(sources, first, last, 360).to_dict()


SCRIPT = """
    import os, signal, sys, time
    from credit.config.sections.data import DataConfig
    from credit.data.store import store_writer as parts
    from credit.data.store import preprocess
    from credit.data.sources import source_reader as sources
    parts._MAX_PART_TIMES = 8
    read, count, pause, most = sources.SourceReader._read_variables, 0, float(sys.argv[2]), int(sys.argv[3])
    def watched(self, indices, names):
        global count
        for index in indices:
            count += 1
            if count == most:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(pause)
            print(index, flush=True)
        return read(self, indices, names)
    if __name__ == "__main__":
        sources.SourceReader._read_variables = watched
        preprocess.write_training_store(DataConfig.model_validate_json(sys.argv[1]), progress=False)
"""


def start_writer(conf: DataConfig, pause: float, kill_at: int) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), conf.model_dump_json(), str(pause), str(kill_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_kill_loses_at_most_one_part(folder: Path) -> None:
    conf = make_conf(folder)
    uninterrupted_conf = make_conf(folder, "whole.zarr")
    write_training_store(uninterrupted_conf)
    killed_process = start_writer(conf, 0.0, 2 * LENGTH + 5)
    killed_process.communicate(timeout=60)
    assert killed_process.returncode == -signal.SIGKILL
    done = zarr.open_group(conf.store, mode="r")["done"][:]
    assert done[: 2 * LENGTH].all()
    assert not done[2 * LENGTH :].any()
    # If the resumed run kept this unfinished part, its field would be wrong.
    zarr.open_group(conf.store, mode="r+")["fields"][2 * LENGTH + 1] = 0.0
    resumed_process = start_writer(conf, 0.0, 10**6)
    written_indices = [int(line) for line in resumed_process.communicate(timeout=60)[0].split()]
    assert resumed_process.returncode == 0
    assert len(written_indices) == len(set(written_indices)) == len(done) - 2 * LENGTH
    assert have_equal_files(conf.store, uninterrupted_conf.store)


def test_two_commands_at_once_write_no_part_twice(folder: Path) -> None:
    conf = make_conf(folder)
    uninterrupted_conf = make_conf(folder, "whole.zarr")
    write_training_store(uninterrupted_conf)
    processes = [start_writer(conf, 0.05, 10**6) for _ in range(2)]
    read_indices = [[int(line) for line in process.communicate(timeout=120)[0].split()] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert have_equal_files(conf.store, uninterrupted_conf.store)
    assert min(map(len, read_indices)) >= LENGTH, "both had something to do"
    # The first change of a part may need the time before it, which is read again if its part is not yet written.
    num_times = len(open_reader(conf).times)
    assert num_times <= len(read_indices[0] + read_indices[1]) <= num_times + num_times // LENGTH


def test_killed_worker_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_a_child() -> None:
        while not (children := multiprocessing.active_children()):
            time.sleep(0.01)
        os.kill(children[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_a_child)
    thread.start()
    with pytest.raises(DataError, match="has been killed, perhaps for lack of memory; run the same command again"):
        write_training_store(make_conf(folder), PreprocessConfig(workers=2))
    thread.join()
    write_training_store(make_conf(folder), PreprocessConfig(workers=2))
    assert len(open_reader(make_conf(folder)).times) == 48


def test_bad_times_are_refused_or_skipped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(folder, {10: np.nan, 30: np.inf})
    with pytest.raises(DataError, match=r"t2m at 2000-01-03T12:00.*missing \(NaN\), the first at latitude"):
        write_training_store(make_conf(folder))
    conf = make_conf(folder, "skipped.zarr", on_bad_time="skip")
    write_training_store(conf)
    assert "2000-01-03T12:00 is left out: t2m" in caplog.text
    reader = open_reader(conf)
    sources = open_sources(make_conf(folder))
    assert len(reader.times) == 46
    assert reader.index_of(reader.calendar.parse("2000-01-03T12:00")) is None
    for index, minutes in enumerate(reader.times):
        np.testing.assert_array_equal(reader.read(index), sources.read(sources.index_of(int(minutes))))
    meta = dict(zarr.open_group(conf.store, mode="r").attrs)["credit"]
    assert list(meta["bad_times"]) == ["2000-01-03T12:00", "2000-01-08T12:00"]
    assert ["2000-01-03T06:00", "2000-01-03T18:00"] in meta["gaps"]
    inside = [n for n, t in enumerate(reader.times) if t <= reader.calendar.parse_period_end("2000-01-09")]
    assert reader.statistics.count[0] == len(inside) * ROWS * COLUMNS
    bad_folder = folder / "worse"
    bad_folder.mkdir()
    write_files(bad_folder, dict.fromkeys(range(10, 14), np.nan))
    with pytest.raises(DataError, match=r"4 of 48 times are bad; data.on_bad_time: skip accepts at most one in 20"):
        write_training_store(make_conf(bad_folder, on_bad_time="skip"))
    with pytest.raises(ValueError, match="skip needs a data.store"):
        make_conf(folder, on_bad_time="skip", store=None)


@pytest.mark.parametrize("compression", ["lz4", "none"])
def test_changed_byte_is_detected(folder: Path, compression: str) -> None:
    conf = make_conf(folder)
    write_training_store(conf, PreprocessConfig(compression=compression))
    reader = open_store(conf.store)
    content = dict(zarr.open_group(conf.store, mode="r").attrs)["credit"]["content"]
    chunk = Path(conf.store) / "fields" / "c" / "5" / "0" / "0" / "0"
    chunk_bytes = bytearray(chunk.read_bytes())
    chunk_bytes[len(chunk_bytes) // 2] ^= 1
    chunk.write_bytes(chunk_bytes)
    with pytest.raises(DataError, match="cannot be read"):
        reader.read(5)
    other_folder = folder / "other"
    other_folder.mkdir()
    write_files(other_folder, {20: 281.0})
    write_training_store(make_conf(other_folder))
    assert dict(zarr.open_group(other_folder / "store.zarr", mode="r").attrs)["credit"]["content"] != content


def test_store_of_format_1_is_read_but_not_continued(folder: Path) -> None:
    """Format 1 had all marks in one chunk, no checksums and no moments."""
    conf = make_conf(folder)
    write_training_store(conf)
    expected = open_reader(conf).statistics.to_dict()
    group = zarr.open_group(conf.store, mode="r+")
    meta = dict(group.attrs)["credit"]
    marks = group["done"][:]
    for name in ("done", "digest", "moments"):
        del group[name]
    group.create_array("done", data=marks, chunks=marks.shape)
    for key in ("moments_transforms", "statistics_transforms", "bad_times", "content", "versions", "gaps"):
        del meta[key]
    group.attrs["credit"] = meta | {"format": 1}
    assert open_reader(conf).statistics.to_dict() == expected
    write_training_store(conf)
    group.attrs["credit"] = meta | {"format": 1, "complete": False}
    with pytest.raises(DataError, match="begun by an older version"):
        write_training_store(conf)


@pytest.mark.slow
def test_dask_cluster_writes_the_same_store(folder: Path) -> None:
    """A local Dask cluster replaces a PBS or Slurm cluster. Its workers are processes on this machine."""
    serial_conf = make_conf(folder, "alone.zarr")
    conf = make_conf(folder)
    write_training_store(serial_conf)
    sources = open_sources(conf)
    splits = build_splits(conf, sources.calendar)
    group = create_store(Path(conf.store), conf, sources, splits, PreprocessConfig())
    task = store_writer.WriteTask(Path(conf.store), sources, 360, {}, False, 2**30)
    pending_parts = store_writer.list_pending_parts(group["done"][:], LENGTH)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        num_written_times = sum(run_on_dask(client, partial(store_writer.write_part, task), pending_parts))
        assert num_written_times == 48
    write_training_store(conf)
    assert have_equal_files(serial_conf.store, conf.store)


# The construction of an object of dask_jobqueue fails half way, and its finalizer raises.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wrong_cluster_settings_are_refused(folder: Path) -> None:
    wrong_settings = PreprocessConfig(cluster="slurm", cluster_options={"coers": 1, "memory": "1GB"})
    with pytest.raises(ConfigError, match="(?s)preprocess.cluster_options.*dask_jobqueue's SLURMCluster"):
        write_training_store(make_conf(folder), wrong_settings)
    with pytest.raises(ValueError, match="no effect without cluster"):
        PreprocessConfig(cluster_options={"cores": 1})


def test_resumed_runs_do_not_mix_moments_of_different_transforms(folder: Path) -> None:
    """If a run in between uses a transform, the finished store still has the statistics without it."""
    conf = make_conf(folder)
    uninterrupted_conf = make_conf(folder, "whole.zarr")
    write_training_store(uninterrupted_conf)
    start_writer(conf, 0.0, LENGTH + 3).communicate(timeout=60)
    transformed_conf = make_conf(folder, transforms={"t2m": {"kind": "log1p", "unit": 10.0}})
    start_writer(transformed_conf, 0.0, LENGTH + 3).communicate(timeout=60)
    done = zarr.open_group(conf.store, mode="r")["done"][:]
    assert done[: 2 * LENGTH].all()
    assert not done.all()
    write_training_store(conf)
    assert open_reader(conf).statistics.to_dict() == open_reader(uninterrupted_conf).statistics.to_dict()


def test_refused_store_leaves_no_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_creation, "require_disk_space", Mock(side_effect=DataError("no room")))
    before = sorted(folder.iterdir())
    with pytest.raises(DataError, match="no room"):
        write_training_store(make_conf(folder))
    assert sorted(folder.iterdir()) == before
