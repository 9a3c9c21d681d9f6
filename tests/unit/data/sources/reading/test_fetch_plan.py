"""Tests of fetching ahead: each chunk of a remote store once, several at a time, within the memory limit."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.data.formats.files import OpenFiles
from credit.data.sources.reading.fetch_estimate import (
    ArrayEstimate,
    FetchEstimate,
    estimate_fetch,
    format_bytes,
    format_seconds,
)
from credit.data.sources.source_reader import open_sources
from credit.data.store import store_writer
from credit.data.store.executor import _PartQueue, _write_parts_from_pipe
from credit.data.store.preprocess import describe_work, write_training_store
from credit.data.store.store_reader import open_store
from credit.errors import DataError, UnavailableError
from tests.unit.data.archives_on_the_fly import ArchiveServer, write_arco_era5, write_weatherbench2
from tests.unit.data.files_on_the_fly import make_config

# The first time is the fifth in a chunk of 8 times.
SPLITS = {
    "train": ["2000-01-02", "2000-01-06"],
    "valid": ["2000-01-08", "2000-01-08"],
    "test": ["2000-01-10", "2000-01-10T18:00"],
}
NUM_TIMES = 36
RENAME = {"z": "geopotential", "t2m": "2m_temperature", "tp": "total_precipitation_6hr"}
pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    write_weatherbench2(folder / "wb2", 60, times_per_chunk=8)
    return folder


def build_config(path: str | Path, store: Path) -> DataConfig:
    return make_config(
        [], p3=["z"], p2=["t2m", "tp"], static=["land_sea_mask"], levels=[850, 500], splits=SPLITS,
        sources=[{"path": str(path), "rename": RENAME}], store=str(store),
        variable_options={"tp": {"temporal": "accumulate"}},
    )  # fmt: skip


def test_each_chunk_is_fetched_once_if_parts_and_chunks_do_not_align(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_writer, "_MAX_PART_TIMES", 4)
    with ArchiveServer(folder, delay=0.02) as server:
        conf = build_config(f"{server.url}/wb2", tmp_path / "store.zarr")
        write_training_store(conf, PreprocessConfig(fetches=3), progress=False)
        counts = server.count_chunks()
        # Times 4 to 39 lie in chunks 0 to 4 of three variables.
        assert len(counts) == 15
        assert set(counts.values()) == {1}
        assert server.most_at_once == 3
    local_config = build_config(folder / "wb2", tmp_path / "local.zarr")
    write_training_store(local_config, progress=False)
    reader = open_store(tmp_path / "store.zarr")
    assert len(reader.times) == NUM_TIMES
    for index in (0, 17, 35):
        np.testing.assert_array_equal(reader.read(index), open_store(tmp_path / "local.zarr").read(index))


def test_each_chunk_is_fetched_once_with_memory_for_one_time(folder: Path, tmp_path: Path) -> None:
    with ArchiveServer(folder) as server:
        conf = build_config(f"{server.url}/wb2", tmp_path / "store.zarr")
        write_training_store(conf, PreprocessConfig(memory_gib=1e-6), progress=False)
        assert set(server.count_chunks().values()) == {1}


def test_resumed_command_fetches_only_missing_chunks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_writer, "_MAX_PART_TIMES", 8)
    with ArchiveServer(folder) as server:
        conf = build_config(f"{server.url}/wb2", tmp_path / "store.zarr")
        write_part = store_writer.write_part
        part_numbers = []

        def stop_at_the_third(task: store_writer.WriteTask, number: int) -> int:
            part_numbers.append(number)
            if len(part_numbers) == 3:
                raise KeyboardInterrupt
            return write_part(task, number)

        monkeypatch.setattr(store_writer, "write_part", stop_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            write_training_store(conf, progress=False)
        monkeypatch.setattr(store_writer, "write_part", write_part)
        server.requests.clear()
        estimate = describe_work(conf, PreprocessConfig())
        server.requests.clear()
        write_training_store(conf, progress=False)
        # 16 of 36 times were written. The last one is the fourth of chunk 2.
        assert len(server.count_chunks()) == 9
        assert set(server.count_chunks().values()) == {1}
        assert "(20 times) will be written" in estimate
        assert "to fetch: 9 chunks" in estimate
        assert describe_work(conf, PreprocessConfig()).endswith("nothing needs to be fetched or written")


def test_the_estimate_refuses_a_store_of_other_splits(folder: Path, tmp_path: Path) -> None:
    conf = build_config(folder / "wb2", tmp_path / "store.zarr")
    write_training_store(conf, progress=False)
    splits = conf.splits.model_copy(update={"test": ("2000-01-10", "2000-01-11")})
    other_config = conf.model_copy(update={"splits": splits})
    for describe_or_write in (
        lambda: describe_work(other_config, PreprocessConfig()),
        lambda: write_training_store(other_config),
    ):
        with pytest.raises(DataError, match=r"does not match the sources: in the store .*36 times.*in the splits"):
            describe_or_write()


def test_the_next_times_are_fetched_only_if_they_fit_into_memory(folder: Path) -> None:
    with ArchiveServer(folder) as server:
        sources = open_sources(build_config(f"{server.url}/wb2", Path("unused")))
        plan = sources.fetch_plan
        store = next(iter(plan.find_chunks([0]).values())).store
        plan.fetch_ahead([0], [20], 2**30)
        assert {key.split("/")[1].split(".")[0] for key in store._ahead} == {"0", "2"}
        plan.fetch_ahead([0], [20], 1000)
        assert {key.split("/")[1].split(".")[0] for key in store._ahead} == {"0"}
        plan.stop()
        assert not store._ahead


def test_chunks_of_an_earlier_source_are_released(folder: Path) -> None:
    """The config has two sources that follow each other in time."""
    with ArchiveServer(folder) as server:
        conf = build_config(f"{server.url}/wb2", Path("unused"))
        (source,) = conf.sources
        # The second source has the same store under another address.
        later = source.model_copy(update={"path": f"{server.url}//wb2", "period": ("2000-01-07", "2000-02-01")})
        earlier = source.model_copy(update={"period": ("2000-01-01", "2000-01-06")})
        sources = open_sources(conf.model_copy(update={"sources": [earlier, later]}))
        plan = sources.fetch_plan
        first_store = next(iter(plan.find_chunks([0]).values())).store
        last_store = next(iter(plan.find_chunks([40]).values())).store
        assert first_store is not last_store
        plan.fetch_ahead([0], [], 0)
        assert first_store._ahead
        plan.fetch_ahead([40], [], 0)
        assert not first_store._ahead
        assert last_store._ahead
        plan.stop()
        assert not last_store._ahead


@pytest.mark.parametrize("is_answered", [True, False])
def test_estimate_keeps_only_successful_fetches(folder: Path, tmp_path: Path, is_answered: bool) -> None:
    with ArchiveServer(folder) as server:
        sources = open_sources(build_config(f"{server.url}/wb2", Path("unused")))
        plan = sources.fetch_plan
        store = next(iter(plan.find_chunks([0]).values())).store
        if not is_answered:
            server.failures["/wb2/2m_temperature/0.0.0"] = [403]
            with pytest.raises(UnavailableError):
                estimate_fetch(sources, [0])
            assert not store._ahead
        else:
            estimate_fetch(sources, [0])
            # The chunks are kept, because the first time is written next.
            assert store._ahead


def test_estimate_is_close_to_the_fetched_bytes(folder: Path, tmp_path: Path) -> None:
    with ArchiveServer(folder) as server:
        conf = build_config(f"{server.url}/wb2", tmp_path / "store.zarr")
        sources = open_sources(conf, OpenFiles(conf.sources, max_fetches=2))
        num_bytes_before = server.num_bytes
        first = sources.index_of(sources.calendar.parse("2000-01-02"))
        estimate = estimate_fetch(sources, range(first, first + NUM_TIMES))
        assert server.num_bytes - num_bytes_before == estimate.measured_bytes
        assert {array.name: array.num_chunks for array in estimate.arrays} == dict.fromkeys(RENAME.values(), 5)
        write_training_store(conf, progress=False)
        fetched_bytes = sum((folder / path.lstrip("/")).stat().st_size for path in server.count_chunks())
        # The chunks differ in their compressed size.
        assert estimate.total_bytes == pytest.approx(fetched_bytes, rel=0.1)
        text = estimate.describe()
        assert f"{server.url}/wb2:" in text
        assert "to fetch: 15 chunks" in text


def test_level_chunks_that_are_not_read_are_not_fetched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The store has one level per chunk, and two sources read from the same store."""
    names = ["geopotential", "total_precipitation"]
    write_arco_era5(tmp_path / "arco", 24, names)
    with xr.open_zarr(tmp_path / "arco", decode_times=False) as dataset:
        for variable in dataset.variables.values():
            variable.encoding = {}
        dataset["geopotential"].encoding = {"chunks": (1, 1, 33, 64)}
        # Fewer levels make fewer files.
        dataset.isel(level=slice(20, 34)).to_zarr(tmp_path / "levels", zarr_format=2)
    splits = {
        "train": ["2000-01-01", "2000-01-01T12:00"],
        "valid": ["2000-01-01T13:00", "2000-01-01T14:00"],
        "test": ["2000-01-01T15:00", "2000-01-01T20:00"],
    }
    with ArchiveServer(tmp_path) as server:
        path = f"{server.url}/levels"
        conf = make_config(
            [], p3=["z"], p2=["tp"], levels=[850, 500],
            sources=[
                {"path": path, "rename": {"z": "geopotential"}, "every": "6h", "variables": ["z"]},
                {"path": path, "rename": {"tp": "total_precipitation"}, "variables": ["tp"]},
            ],
            splits=splits, split_gap="1h",
            variable_options={"tp": {"temporal": "accumulate"}}, store=str(tmp_path / "store.zarr"),
        )  # fmt: skip
        write_training_store(conf, progress=False)
        counts = server.count_chunks()
    assert set(counts.values()) == {1}
    # Hourly sums at more times than those of the run cause no warning. The sum that ends at 00 UTC is missing.
    assert "1 of 4 times are left out, because tp lack values" in caplog.text
    chunks = sorted(path.split("/")[-1] for path in counts if "geopotential" in path)
    # Hours 06, 12 and 18 UTC after 24 h without values, and two of 14 levels. No sum ends at 00 UTC.
    assert chunks == sorted(f"{24 + hour}.{level}.0.0" for hour in (6, 12, 18) for level in (1, 10))
    # All hours of the windows that end at these times.
    assert len([path for path in counts if "precipitation" in path]) == 18


class _ServerError(Exception):
    """Error that cannot be pickled, like the errors of aiohttp."""

    def __reduce__(self) -> str:
        raise TypeError("can't pickle headers")


def _fail_to_fetch(number: int) -> int:
    raise UnavailableError(f"part {number} cannot be fetched") from _ServerError("503")


def test_a_worker_reports_an_error_whose_cause_cannot_be_pickled() -> None:
    pytest.importorskip("tblib.pickling_support").install()
    pipe, worker_pipe = multiprocessing.Pipe()
    pipe.send(_fail_to_fetch)
    pipe.send(3)
    worker = threading.Thread(target=_write_parts_from_pipe, args=(worker_pipe,), daemon=True)
    worker.start()
    assert pipe.poll(20), "the worker has ended without a result"
    error = pipe.recv()
    pipe.close()
    worker.join()
    assert isinstance(error, UnavailableError)
    assert str(error) == "part 3 cannot be fetched"
    assert "503" in error.__notes__[0]


def test_workers_get_adjacent_parts() -> None:
    queue = _PartQueue(range(10), 3)
    parts_of_worker = {worker: [queue.take(worker), queue.take(worker)] for worker in range(3)}
    assert parts_of_worker == {0: [0, 1], 1: [3, 4], 2: [6, 7]}
    # Worker 2 takes its own remaining parts, and then the last parts of the other workers.
    assert [queue.take(2) for _ in range(4)] == [8, 9, 2, 5]
    assert [queue.take(worker) for worker in range(3)] == [None, None, None]


def test_estimate_without_a_measurement_contains_no_duration() -> None:
    """The archive may have no chunk for the first time."""
    text = FetchEstimate([ArrayEstimate("https://a.zarr", "t", 10, 2**20)], 0, 0.5).describe()
    assert text.endswith(
        "at most 10 chunks, 10.0 MiB; no chunk was fetched to read the first time, so the rate is not known"
    )


def test_bytes_and_seconds_are_formatted() -> None:
    assert [format_bytes(value) for value in (2048, 3 * 2**20, 1.5 * 2**30, 2**41)] == [
        "2.0 KiB", "3.0 MiB", "1.5 GiB", "2.0 TiB",
    ]  # fmt: skip
    assert [format_seconds(value) for value in (30, 600, 9000, 5 * 86400)] == ["30 s", "10 min", "2.5 h", "5.0 days"]
