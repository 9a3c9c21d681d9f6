"""Tests of the chunk cache: copies on a local disk are read instead of the store, and damaged copies are replaced."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from credit.data.reader import open_reader
from credit.data.store import chunk_cache
from credit.data.store.preprocess import write_training_store
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W = 8, 16


Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def cached_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, np.ndarray, Path, Path]:
    """Return a reader with a cache, the fields, the folder of chunks and the folder of copies. The disk has space."""
    monkeypatch.setattr(chunk_cache.shutil, "disk_usage", lambda path: Usage(10**9, 0, 10**9))
    t = random_fields(40, H, W)
    write_file(tmp_path / "a.nc", {"t": t}, np.arange(40) * 6)
    conf = make_config(
        tmp_path / "a.nc",
        p2=["t"],
        store=str(tmp_path / "store.zarr"),
        cache="disk",
        cache_folder=str(tmp_path / "near"),
    )
    write_training_store(conf)
    reader = open_reader(conf)
    reader.read(0)
    (folder,) = (tmp_path / "near").iterdir()
    return reader, t, tmp_path / "store.zarr" / "fields" / "c", folder


def list_copies(folder: Path) -> list[str]:
    """Return the names of the copies, without lock files."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".lock_"))


def test_fields_are_copied_and_read_from_their_copies(cached_store: tuple) -> None:
    reader, t, chunks, folder = cached_store
    for index in (3, 5):
        np.testing.assert_array_equal(reader.read(index)[0], t[index].astype(np.float32))
    assert list_copies(folder) == ["0", "3", "5"]
    shutil.rmtree(chunks / "3")
    np.testing.assert_array_equal(reader.read(3)[0], t[3].astype(np.float32))


def test_damaged_copy_is_replaced(cached_store: tuple, caplog: pytest.LogCaptureFixture) -> None:
    reader, t, _, folder = cached_store
    original_bytes = (folder / "0").read_bytes()
    (folder / "0").write_bytes(original_bytes[:-1] + bytes([original_bytes[-1] ^ 1]))
    np.testing.assert_array_equal(reader.read(0)[0], t[0].astype(np.float32))
    assert (folder / "0").read_bytes() == original_bytes
    assert "the copy is damaged" in caplog.text


def test_a_damaged_store_is_not_copied(cached_store: tuple) -> None:
    reader, _, chunks, folder = cached_store
    (chunk,) = (path for path in (chunks / "7").rglob("*") if path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(DataError, match="2000-01-02T18:00 cannot be read"):
        reader.read(7)
    assert not (folder / "7").exists()


def test_full_disk_causes_a_warning_and_no_copies(
    cached_store: tuple, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, t, _, folder = cached_store
    monkeypatch.setattr(chunk_cache.shutil, "disk_usage", lambda path: Usage(10**9, 9 * 10**8, 10**8))
    with caplog.at_level(logging.WARNING):
        for index in (3, 4):
            np.testing.assert_array_equal(reader.read(index)[0], t[index].astype(np.float32))
    assert list_copies(folder) == ["0"]
    assert caplog.text.count("cannot be written") == 1


def test_lost_chunk_of_the_store_is_an_error_without_a_cache_warning(
    cached_store: tuple, caplog: pytest.LogCaptureFixture
) -> None:
    reader, t, chunks, folder = cached_store
    shutil.rmtree(chunks / "7")
    with pytest.raises(DataError, match="its chunk is lost"):
        reader.read(7)
    assert "cannot be written" not in caplog.text
    reader.read(8)
    assert list_copies(folder) == ["0", "8"]


def read_through_cache(origin: str, folder: Path, reads: Path) -> None:
    """Read eight files through a cache, and create a file in `reads` for each copy of an original."""
    copyfile = shutil.copyfile

    def copy_and_record(source: str, target: Path) -> None:
        (reads / f"{Path(source).name}.{os.getpid()}").touch()
        copyfile(source, target)

    chunk_cache.shutil.copyfile = copy_and_record
    cache = chunk_cache.ChunkCache(folder)
    for number in range(8):

        def read_file(path: str, number: int = number) -> None:
            assert Path(path).read_text() == f"content {number}"
            assert path.startswith(str(folder)), "the original is read by copying it only"

        cache.read_cached(str(number), f"{origin}/{number}", read_file)


# Newer versions of Python warn about forks in processes with threads. The child processes here use no threads.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_of_a_node_copy_each_original_once(tmp_path: Path) -> None:
    for name in ("origin", "reads"):
        (tmp_path / name).mkdir()
    for number in range(8):
        (tmp_path / "origin" / str(number)).write_text(f"content {number}")
    context = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "origin"), tmp_path / "near", tmp_path / "reads")
    processes = [context.Process(target=read_through_cache, args=arguments) for _ in range(16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 16
    assert sorted(path.name.split(".")[0] for path in (tmp_path / "reads").iterdir()) == [str(n) for n in range(8)]
