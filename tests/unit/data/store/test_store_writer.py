"""Parts of a store: by many processes, in any order, after kills and with bad times, always the same bytes."""

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


def write_files(folder: Path, spoil: dict[int, float] | None = None) -> None:
    """Write 15 days in three files; `spoil` puts a value into the field of a time."""
    rng = np.random.default_rng(3)
    t2m = (280 + np.cumsum(rng.normal(0, 1, (TIMES, ROWS, COLUMNS)), axis=0)).astype(np.float32)
    for index, value in (spoil or {}).items():
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


def make(folder: Path, name: str = "store.zarr", **changes: object) -> DataConfig:
    base = {
        "sources": [{"path": str(folder / "t2m_*.nc")}],
        "variables": {"prognostic": {"vars_2D": ["t2m"]}},
        "splits": {"train": ["2000-01-02", "2000-01-09"], "valid": ["2000-01-11"] * 2, "test": ["2000-01-13"] * 2},
        "split_gap": "1d",
        "store": str(folder / name),
    }
    return DataConfig.model_validate({**base, **changes})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(tmp_path)
    monkeypatch.setattr(store_writer, "_MAX_PART_TIMES", LENGTH)
    return tmp_path


def files_of(store: str) -> dict[str, bytes]:
    root = Path(store)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def same_but_name(one: str, other: str) -> bool:
    return files_of(one) == files_of(other)


def test_any_order_any_number_of_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, many, shuffled = (make(folder, f"{name}.zarr") for name in ("alone", "many", "shuffled"))
    write_training_store(alone)
    write_training_store(many, PreprocessConfig(workers=3))
    order = store_writer.list_pending_parts
    monkeypatch.setattr(
        store_writer, "list_pending_parts", lambda *args: random.Random(1).sample(order(*args), len(order(*args)))
    )
    write_training_store(shuffled)
    assert same_but_name(alone.store, many.store)
    assert same_but_name(alone.store, shuffled.store)
    reader = open_reader(alone)
    sources = open_sources(alone)
    first = reader.calendar.parse("2000-01-02")
    last = reader.calendar.parse_period_end("2000-01-09")
    assert reader.statistics.to_dict() == fit_statistics(sources, first, last, 360).to_dict(), "to the last bit"
    assert not store_writer.build_lock_folder_path(Path(alone.store)).exists()
    group = zarr.open_group(alone.store, mode="r")
    assert [int(d) for d in group["digest"][:]] == [
        store_writer.hash_fields(reader.read(n), "crc32c") for n in range(len(reader.times))
    ]


@pytest.mark.parametrize(
    ("chunk", "held_times", "reads"),
    [(20, 60, [16, 4, 16, 4, 8]), (5, 60, [8, 8, 8, 8, 4, 4, 8]), (20, 6, [8, 8, 8, 8, 4, 4, 8])],
)
def test_a_part_holds_the_sources_chunks_and_reads_them_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, held_times: int, reads: list[int]
) -> None:
    for path in folder.glob("*.nc"):
        dataset = xr.load_dataset(path, decode_times=False)
        dataset.to_netcdf(path, encoding={"t2m": {"chunksizes": (chunk, ROWS, COLUMNS)}})
    # the store begins at the fifth time; a read ends where a file of 20 does
    lengths: list[int] = []
    plain = series.read_file_variable
    conf = make(folder)

    def counted(files: object, piece: object, position: slice, on_file_grid: bool) -> np.ndarray:
        lengths.append(position.stop - position.start)
        return plain(files, piece, position, on_file_grid)

    monkeypatch.setattr(series, "read_file_variable", counted)
    held = held_times * open_sources(conf).bytes_per_time
    write_training_store(conf, PreprocessConfig(memory_gib=(held + 1) / 2**30))
    monkeypatch.undo()
    assert [n for n in lengths if n > 1] == reads
    reader = open_reader(conf)
    sources = open_sources(conf)
    for number, minutes in enumerate(reader.times.tolist()):
        np.testing.assert_array_equal(reader.read(number), sources.read(sources.index_of(minutes)))


@pytest.mark.parametrize("compression", store_creation._COMPRESSORS)
def test_a_chunk_has_the_bytes_that_zarr_writes(folder: Path, compression: str) -> None:
    conf = make(folder)
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


def test_stores_of_before_keep_their_checksums(folder: Path) -> None:
    conf = make(folder)
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


def test_statistics_are_numpys(folder: Path) -> None:
    conf = make(folder, transforms={"t2m": {"kind": "log1p", "unit": 10.0}})
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


def test_another_period_reads_no_field(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_training_store(make(folder))
    splits = {"train": ["2000-01-03", "2000-01-07"], "valid": ["2000-01-11"] * 2, "test": ["2000-01-13"] * 2}
    # the store's own times are those from the first split to the last
    splits["valid"] = ["2000-01-02", "2000-01-02"]
    monkeypatch.setattr(StoreReader, "read", None)
    other = make(folder, splits=splits, split_gap="1min")
    write_training_store(other)
    monkeypatch.undo()
    reader = open_reader(other)
    sources = open_sources(other)
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


def start(conf: DataConfig, pause: float, most: int) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), conf.model_dump_json(), str(pause), str(most)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_kill_loses_one_part_at_most(folder: Path) -> None:
    conf = make(folder)
    uninterrupted_conf = make(folder, "whole.zarr")
    write_training_store(uninterrupted_conf)
    killed = start(conf, 0.0, 2 * LENGTH + 5)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    done = zarr.open_group(conf.store, mode="r")["done"][:]
    assert done[: 2 * LENGTH].all()
    assert not done[2 * LENGTH :].any()
    # which, were it kept, would be a wrong field
    zarr.open_group(conf.store, mode="r+")["fields"][2 * LENGTH + 1] = 0.0
    resumed = start(conf, 0.0, 10**6)
    again = [int(line) for line in resumed.communicate(timeout=60)[0].split()]
    assert resumed.returncode == 0
    assert len(again) == len(set(again)) == len(done) - 2 * LENGTH
    assert same_but_name(conf.store, uninterrupted_conf.store)


def test_two_at_once_write_no_part_twice(folder: Path) -> None:
    conf = make(folder)
    uninterrupted_conf = make(folder, "whole.zarr")
    write_training_store(uninterrupted_conf)
    both = [start(conf, 0.05, 10**6) for _ in range(2)]
    read = [[int(line) for line in process.communicate(timeout=120)[0].split()] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert same_but_name(conf.store, uninterrupted_conf.store)
    assert min(map(len, read)) >= LENGTH, "both had something to do"
    # a part's first change may need the time before it, which is read once more where its part is not there yet
    times = len(open_reader(conf).times)
    assert times <= len(read[0] + read[1]) <= times + times // LENGTH


def test_a_killed_process_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_a_child() -> None:
        while not (children := multiprocessing.active_children()):
            time.sleep(0.01)
        os.kill(children[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_a_child)
    thread.start()
    with pytest.raises(DataError, match="has been killed, perhaps for lack of memory; run the same command again"):
        write_training_store(make(folder), PreprocessConfig(workers=2))
    thread.join()
    write_training_store(make(folder), PreprocessConfig(workers=2))
    assert len(open_reader(make(folder)).times) == 48


def test_bad_times(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(folder, {10: np.nan, 30: np.inf})
    with pytest.raises(DataError, match=r"t2m at 2000-01-03T12:00.*missing \(NaN\), the first at latitude"):
        write_training_store(make(folder))
    conf = make(folder, "skipped.zarr", on_bad_time="skip")
    write_training_store(conf)
    assert "2000-01-03T12:00 is left out: t2m" in caplog.text
    reader = open_reader(conf)
    sources = open_sources(make(folder))
    assert len(reader.times) == 46
    assert reader.index_of(reader.calendar.parse("2000-01-03T12:00")) is None
    for index, minutes in enumerate(reader.times):
        np.testing.assert_array_equal(reader.read(index), sources.read(sources.index_of(int(minutes))))
    meta = dict(zarr.open_group(conf.store, mode="r").attrs)["credit"]
    assert list(meta["bad_times"]) == ["2000-01-03T12:00", "2000-01-08T12:00"]
    assert ["2000-01-03T06:00", "2000-01-03T18:00"] in meta["gaps"]
    inside = [n for n, t in enumerate(reader.times) if t <= reader.calendar.parse_period_end("2000-01-09")]
    assert reader.statistics.count[0] == len(inside) * ROWS * COLUMNS
    worse = folder / "worse"
    worse.mkdir()
    write_files(worse, dict.fromkeys(range(10, 14), np.nan))
    with pytest.raises(DataError, match=r"4 of 48 times are bad; data.on_bad_time: skip accepts at most one in 20"):
        write_training_store(make(worse, on_bad_time="skip"))
    with pytest.raises(ValueError, match="skip needs a data.store"):
        make(folder, on_bad_time="skip", store=None)


@pytest.mark.parametrize("compression", ["lz4", "none"])
def test_a_changed_byte_is_seen(folder: Path, compression: str) -> None:
    conf = make(folder)
    write_training_store(conf, PreprocessConfig(compression=compression))
    before = open_store(conf.store)
    content = dict(zarr.open_group(conf.store, mode="r").attrs)["credit"]["content"]
    chunk = Path(conf.store) / "fields" / "c" / "5" / "0" / "0" / "0"
    raw = bytearray(chunk.read_bytes())
    raw[len(raw) // 2] ^= 1
    chunk.write_bytes(raw)
    with pytest.raises(DataError, match="cannot be read"):
        before.read(5)
    other = folder / "other"
    other.mkdir()
    write_files(other, {20: 281.0})
    write_training_store(make(other))
    assert dict(zarr.open_group(other / "store.zarr", mode="r").attrs)["credit"]["content"] != content


def test_a_store_of_before(folder: Path) -> None:
    """Format 1 had all marks in one chunk, no checksums and no moments."""
    conf = make(folder)
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
def test_on_a_cluster(folder: Path) -> None:
    """The way of a PBS or Slurm cluster, with processes of this machine as its jobs."""
    alone = make(folder, "alone.zarr")
    conf = make(folder)
    write_training_store(alone)
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
    assert same_but_name(alone.store, conf.store)


# dask_jobqueue's own object, whose construction fails half way
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_clusters_settings(folder: Path) -> None:
    wrong = PreprocessConfig(cluster="slurm", cluster_options={"coers": 1, "memory": "1GB"})
    with pytest.raises(ConfigError, match="(?s)preprocess.cluster_options.*dask_jobqueue's SLURMCluster"):
        write_training_store(make(folder), wrong)
    with pytest.raises(ValueError, match="no effect without cluster"):
        PreprocessConfig(cluster_options={"cores": 1})


def test_moments_are_of_one_kind_whatever_a_resumed_run_asks(folder: Path) -> None:
    """Begun plainly, gone on with a transform, ended plainly: the statistics are the plain ones."""
    conf = make(folder)
    uninterrupted_conf = make(folder, "whole.zarr")
    write_training_store(uninterrupted_conf)
    start(conf, 0.0, LENGTH + 3).communicate(timeout=60)
    changed = make(folder, transforms={"t2m": {"kind": "log1p", "unit": 10.0}})
    start(changed, 0.0, LENGTH + 3).communicate(timeout=60)
    done = zarr.open_group(conf.store, mode="r")["done"][:]
    assert done[: 2 * LENGTH].all()
    assert not done.all()
    write_training_store(conf)
    assert open_reader(conf).statistics.to_dict() == open_reader(uninterrupted_conf).statistics.to_dict()


def test_a_store_that_is_refused_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_creation, "require_disk_space", Mock(side_effect=DataError("no room")))
    before = sorted(folder.iterdir())
    with pytest.raises(DataError, match="no room"):
        write_training_store(make(folder))
    assert sorted(folder.iterdir()) == before
