"""Tests of reading zarr stores from a URL, against the same store on a local disk."""

from __future__ import annotations

import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
import xarray as xr
from fsspec.registry import known_implementations

from credit.config.sections.data import DataConfig
from credit.config.sections.source import SourceConfig
from credit.data.formats.files import OpenFiles
from credit.data.reader import open_reader
from credit.data.sources.source_reader import open_sources
from credit.data.store.preprocess import write_training_store
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W = 8, 16


def build_config(path: str | Path, **options: object) -> DataConfig:
    """Return a data section with one source."""
    return make_config(path, p3=["t"], levels=[850], **options)


@pytest.fixture(params=[(2, True), (2, False), (3, True), (3, False)], ids=str)
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Write a store of zarr format 2 or 3, with or without consolidated metadata."""
    path = write_file(tmp_path / "a.nc", {"t": random_fields(32, 2, H, W)}, np.arange(32) * 6, levels=[500, 850])
    version, consolidated = request.param
    with xr.open_dataset(path, decode_times=False) as dataset:
        for variable in dataset.variables.values():
            variable.encoding = {}
        dataset.to_zarr(tmp_path / "a.zarr", zarr_format=version, consolidated=consolidated)
    return tmp_path / "a.zarr"


class _SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serve `tmp_path` over HTTP, and yield the address."""
    handler = functools.partial(_SilentHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()


pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")  # raised while writing


def test_store_is_read_over_http(store: Path, server: str) -> None:
    local_reader = open_sources(build_config(store))
    remote_reader = open_sources(build_config(f"{server}/a.zarr"))
    np.testing.assert_array_equal(remote_reader.times, local_reader.times)
    for index in (0, 31):
        np.testing.assert_array_equal(remote_reader.read(index), local_reader.read(index))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(remote_reader)).read(5), local_reader.read(5))
    with pytest.raises(DataError, match="b.zarr: there is no zarr store"):
        open_sources(build_config(f"{server}/b.zarr"))


def test_worker_does_not_close_datasets_of_its_parent(store: Path) -> None:
    """A worker that drops the S3 session of its parent reports an error, so it must keep a reference."""
    files = OpenFiles([SourceConfig(path=str(store))])
    parent_dataset = weakref.ref(files.get(store, 0))
    files._owner = -1  # as in a worker
    assert files.get(store, 0) is not parent_dataset()
    gc.collect()
    assert parent_dataset() is not None
    assert not pickle.loads(pickle.dumps(files))._datasets_of_parent


def test_training_store_is_written_from_a_store_in_memory(store: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(store), "/test_remote/a.zarr", recursive=True)
    try:
        conf = build_config("memory://test_remote/a.zarr", store=str(tmp_path / "store.zarr"))
        write_training_store(conf, progress=False)
        write_training_store(conf, progress=False)  # the second run recognises the unchanged source
        np.testing.assert_array_equal(open_reader(conf).read(7), open_sources(build_config(store)).read(7))
    finally:
        memory.rm("/test_remote", recursive=True)


def test_invalid_urls_are_refused() -> None:
    with pytest.raises(DataError, match="cannot be read as a zarr store.*storage_options"):
        open_sources(build_config("http://127.0.0.1:9/a.zarr"))
    with pytest.raises(DataError, match="a URL cannot contain"):
        open_sources(build_config("memory://a/*.zarr"))
    with pytest.raises(DataError, match="Protocol not known"):
        open_sources(build_config("gopher://a/b.zarr"))


def test_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    library = {"class": "no_such_library.FileSystem", "err": "Install no_such_library"}
    monkeypatch.setitem(known_implementations, "nothing", library)
    with pytest.raises(DataError, match=r"no_such_library; .*pip install .*\[cloud\]"):
        open_sources(build_config("nothing://a/b.zarr"))
