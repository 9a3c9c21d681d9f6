"""Tests of requests to a remote store: repeated requests and error messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from zarr.abc.store import RangeByteRequest, SuffixByteRequest

from credit.config.sections.source import SourceConfig
from credit.data.formats.files import open_file
from credit.data.formats.zarr import fetching_store
from credit.data.formats.zarr.fetching_store import FetchError, FetchingStore, _find_delay
from credit.data.sources import source_reader
from credit.data.sources.source_reader import open_sources
from credit.data.store import preprocess
from credit.data.store.preprocess import write_training_store
from credit.data.store.store_reader import read_description
from credit.errors import DataError, UnavailableError
from tests.unit.data.archives_on_the_fly import ArchiveServer, write_arco_era5
from tests.unit.data.files_on_the_fly import make_config

SPLITS = {
    "train": ["2000-01-01", "2000-01-01T12:00"],
    "valid": ["2000-01-01T13:00", "2000-01-01T16:00"],
    "test": ["2000-01-01T17:00", "2000-01-01T23:00"],
}
# Chunk of 2000-01-01 05 UTC. It follows 24 empty hours before 2000.
CHUNK = "/arco/2m_temperature/29.0.0"
pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    write_arco_era5(folder / "arco", 24, ["2m_temperature", "mean_sea_level_pressure"])
    return folder


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ArchiveServer]:
    monkeypatch.setattr(fetching_store, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(fetching_store, "LONGEST_DELAY_SECONDS", 0.05)
    with ArchiveServer(folder) as archive_server:
        yield archive_server


def build_config(server: ArchiveServer, **options: object) -> object:
    source = {
        "path": f"{server.url}/arco",
        "rename": {"t2m": "2m_temperature", "msl": "mean_sea_level_pressure"},
    }
    return make_config([], p2=["t2m", "msl"], sources=[source], splits=SPLITS, split_gap="1h", **options)


def test_a_request_is_repeated_until_it_succeeds(server: ArchiveServer, folder: Path) -> None:
    server.failures[CHUNK] = [503, 429, 500, 504]
    reader = open_sources(build_config(server))
    fields = reader.read(5)
    assert server.requests[CHUNK] == 5
    local_config = make_config(folder / "arco", p2=["2m_temperature", "mean_sea_level_pressure"], splits=SPLITS)
    np.testing.assert_array_equal(fields, open_sources(local_config).read(5))


def test_request_of_the_store_metadata_is_repeated(server: ArchiveServer) -> None:
    server.failures["/arco/.zmetadata"] = [503, 503]
    assert len(open_sources(build_config(server)).times) == 24


@pytest.mark.parametrize("status", [401, 403])
def test_refused_request_is_not_repeated(server: ArchiveServer, status: int) -> None:
    reader = open_sources(build_config(server))
    server.failures[CHUNK] = [status] * 20
    with pytest.raises(UnavailableError, match=f"2m_temperature cannot be fetched.*{status}.*your access"):
        reader.read(5)
    assert server.requests[CHUNK] == 1


def test_refused_request_marks_no_time_as_bad(server: ArchiveServer, tmp_path: Path) -> None:
    """Access can expire during a download that takes days."""
    conf = build_config(server, store=str(tmp_path / "store.zarr"), on_bad_time="skip")
    server.failures[CHUNK] = [403] * 20
    with pytest.raises(UnavailableError, match="403"):
        write_training_store(conf, progress=False)
    server.failures.clear()
    write_training_store(conf, progress=False)
    assert read_description(tmp_path / "store.zarr")["bad_times"] == {}


def test_failing_server_is_reported_as_unavailable(server: ArchiveServer) -> None:
    server.failures["/arco/.zmetadata"] = [503] * fetching_store.MAX_ATTEMPTS
    with pytest.raises(UnavailableError, match=r"cannot be read as a zarr store \(.zmetadata: 8 requests failed"):
        open_file(f"{server.url}/arco", SourceConfig(path=f"{server.url}/arco"))


@pytest.mark.parametrize("error", [UnavailableError, KeyboardInterrupt])
def test_stopped_process_fetches_nothing_more(
    server: ArchiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    # Two times are read at once.
    monkeypatch.setattr(source_reader, "_BYTES_AT_ONCE", 200_000)
    conf = build_config(server, store=str(tmp_path / "store.zarr"))
    plan = None

    def stop_in_the_first_part(write_part: partial, *arguments: object) -> None:
        nonlocal plan
        (task,) = write_part.args
        plan = task.sources.fetch_plan
        server.failures[CHUNK] = [503] * fetching_store.MAX_ATTEMPTS
        if error is KeyboardInterrupt:
            monkeypatch.setattr(task.sources, "read_each", interrupt)
        try:
            write_part(0)
        finally:
            assert all(not store._ahead for store in plan._used_stores.values())

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(preprocess, "run_until_done", stop_in_the_first_part)
    with pytest.raises(error):
        write_training_store(conf, progress=False)
    assert plan is not None and plan._used_stores


def test_failing_server_marks_no_time_as_bad(server: ArchiveServer, tmp_path: Path) -> None:
    conf = build_config(server, store=str(tmp_path / "store.zarr"), on_bad_time="skip")
    server.failures[CHUNK] = [503] * fetching_store.MAX_ATTEMPTS
    message = (
        r"arco: 2m_temperature cannot be fetched at some time from 2000-01-01T00:00 to 2000-01-01T23:00 "
        r"\(2m_temperature/29.0.0: 8 requests failed.*503.*same command again"
    )
    with pytest.raises(UnavailableError, match=message):
        write_training_store(conf, progress=False)
    assert server.requests[CHUNK] == fetching_store.MAX_ATTEMPTS
    write_training_store(conf, progress=False)
    assert read_description(tmp_path / "store.zarr")["bad_times"] == {}


def test_absent_chunk_contains_missing_values(server: ArchiveServer) -> None:
    reader = open_sources(build_config(server))
    server.failures[CHUNK] = [404]
    with pytest.raises(DataError, match="t2m at 2000-01-01T05:00: the whole field is missing"):
        reader.read(5)


def test_server_without_range_requests_is_reported(server: ArchiveServer) -> None:
    """The server of these tests ignores the Range header."""
    store = FetchingStore(f"{server.url}/arco", {}, 2)
    key = CHUNK.removeprefix("/arco/")
    for byte_range in (RangeByteRequest(0, 4), SuffixByteRequest(4)):
        with pytest.raises(FetchError, match="received .* bytes instead of 4; .*HTTP Range"):
            store._fetch(key, byte_range)


def test_unreachable_server_is_reported_quickly() -> None:
    start = time.perf_counter()
    with pytest.raises(DataError, match="cannot be read as a zarr store.*storage_options"):
        open_sources(make_config("http://127.0.0.1:9/a.zarr", p2=["t"]))
    assert time.perf_counter() - start < 5


def test_broken_connection_is_retried(server: ArchiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FetchingStore(f"{server.url}/arco", {}, 2)
    content = store.read_object(CHUNK.removeprefix("/arco/"))
    cat_file = store._file_system.cat_file
    errors = [ConnectionResetError("peer"), TimeoutError("slow")]

    def break_twice(*arguments: object, **options: object) -> bytes:
        if errors:
            raise errors.pop()
        return cat_file(*arguments, **options)

    monkeypatch.setattr(store._file_system, "cat_file", break_twice)
    assert store.read_object(CHUNK.removeprefix("/arco/")) == content
    assert not errors
    errors.extend([ConnectionResetError("peer")] * fetching_store.MAX_ATTEMPTS)
    with pytest.raises(FetchError, match="8 requests failed, the last with ConnectionResetError: peer"):
        store.read_object(CHUNK.removeprefix("/arco/"))


def test_delay_doubles_and_respects_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching_store.random, "uniform", lambda low, high: high)
    delays = [_find_delay(OSError(), attempt) for attempt in range(1, 9)]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]

    class RateLimitError(Exception):
        headers = {"Retry-After": "20"}

    assert _find_delay(RateLimitError(), 1) == 20
    assert _find_delay(RateLimitError(), 7) == 60


def test_failed_fetch_can_be_started_again(server: ArchiveServer) -> None:
    store = FetchingStore(f"{server.url}/arco", {}, 2)
    key = CHUNK.removeprefix("/arco/")
    server.failures[CHUNK] = [403]
    store.fetch_ahead([key])
    store.wait()
    assert store._ahead[key].exception() is not None
    store.fetch_ahead([key])
    assert store._ahead[key].result() == store.read_object(key)


@pytest.mark.parametrize("is_closed", [True, False])
def test_retries_stop_when_a_chunk_is_no_longer_needed(
    server: ArchiveServer, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    monkeypatch.setattr(fetching_store, "FIRST_DELAY_SECONDS", 60.0)
    monkeypatch.setattr(fetching_store, "LONGEST_DELAY_SECONDS", 60.0)
    store = FetchingStore(f"{server.url}/arco", {}, 2)
    server.failures[CHUNK] = [503] * 3
    start = time.perf_counter()
    key = CHUNK.removeprefix("/arco/")
    store.fetch_ahead([key])
    fetch = store._ahead[key]
    while not server.requests[CHUNK]:
        time.sleep(0.01)
    if is_closed:
        store.close()
    else:
        store.fetch_ahead([])
    assert "503" in str(fetch.exception(timeout=30))
    assert time.perf_counter() - start < 20
