"""Zarr stores behind a URL, against the same store on the disk."""

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


def config(path: str | Path, **options: object) -> DataConfig:
    """Return a data section with one source."""
    return make_config(path, p3=["t"], levels=[850], **options)


@pytest.fixture(params=[(2, True), (2, False), (3, True), (3, False)], ids=str)
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A store of format 2 or 3, consolidated or not."""
    path = write_file(tmp_path / "a.nc", {"t": random_fields(32, 2, H, W)}, np.arange(32) * 6, levels=[500, 850])
    version, consolidated = request.param
    with xr.open_dataset(path, decode_times=False) as dataset:
        for variable in dataset.variables.values():
            variable.encoding = {}
        dataset.to_zarr(tmp_path / "a.zarr", zarr_format=version, consolidated=consolidated)
    return tmp_path / "a.zarr"


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of `tmp_path`."""
    handler = functools.partial(_Silent, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")  # while writing


def test_over_http(store: Path, server: str) -> None:
    local_reader = open_sources(config(store))
    remote_reader = open_sources(config(f"{server}/a.zarr"))
    np.testing.assert_array_equal(remote_reader.times, local_reader.times)
    for index in (0, 31):
        np.testing.assert_array_equal(remote_reader.read(index), local_reader.read(index))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(remote_reader)).read(5), local_reader.read(5))
    with pytest.raises(DataError, match="b.zarr: there is no zarr store"):
        open_sources(config(f"{server}/b.zarr"))


def test_what_was_open_before_a_fork_is_not_ended_by_a_worker(store: Path) -> None:
    """An S3 session that a worker drops is told as an error, although it is the parent's."""
    files = OpenFiles([SourceConfig(path=str(store))])
    before = weakref.ref(files.get(store, 0))
    files._owner = -1  # as in a worker
    assert files.get(store, 0) is not before()
    gc.collect()
    assert before() is not None
    assert not pickle.loads(pickle.dumps(files))._datasets_of_parent


def test_in_memory_and_into_the_training_store(store: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(store), "/test_remote/a.zarr", recursive=True)
    try:
        conf = config("memory://test_remote/a.zarr", store=str(tmp_path / "store.zarr"))
        write_training_store(conf, progress=False)
        write_training_store(conf, progress=False)  # the source is recognised as the same
        np.testing.assert_array_equal(open_reader(conf).read(7), open_sources(config(store)).read(7))
    finally:
        memory.rm("/test_remote", recursive=True)


def test_refused() -> None:
    with pytest.raises(DataError, match="cannot be read as a zarr store.*storage_options"):
        open_sources(config("http://127.0.0.1:9/a.zarr"))
    with pytest.raises(DataError, match="a URL cannot contain"):
        open_sources(config("memory://a/*.zarr"))
    with pytest.raises(DataError, match="Protocol not known"):
        open_sources(config("gopher://a/b.zarr"))


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = {"class": "no_such_library.FileSystem", "err": "Install no_such_library"}
    monkeypatch.setitem(known_implementations, "nothing", library)
    with pytest.raises(DataError, match=r"no_such_library; .*pip install .*\[cloud\]"):
        open_sources(config("nothing://a/b.zarr"))
