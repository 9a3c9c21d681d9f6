"""Copies on a nearer disk: read instead of the store, never trusted more than it."""

from __future__ import annotations

import logging
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
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, np.ndarray, Path, Path]:
    """A reader through copies; the fields, the folder of the store's chunks and that of the copies. There is room."""
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


def test_what_was_read_is_read_there(opened: tuple) -> None:
    reader, t, chunks, folder = opened
    for index in (3, 5):
        np.testing.assert_array_equal(reader.read(index)[0], t[index].astype(np.float32))
    assert sorted(path.name for path in folder.iterdir()) == ["0", "3", "5"]
    shutil.rmtree(chunks / "3")
    np.testing.assert_array_equal(reader.read(3)[0], t[3].astype(np.float32))


def test_a_damaged_copy_is_made_again(opened: tuple, caplog: pytest.LogCaptureFixture) -> None:
    reader, t, _, folder = opened
    original_bytes = (folder / "0").read_bytes()
    (folder / "0").write_bytes(original_bytes[:-1] + bytes([original_bytes[-1] ^ 1]))
    np.testing.assert_array_equal(reader.read(0)[0], t[0].astype(np.float32))
    assert (folder / "0").read_bytes() == original_bytes
    assert "the copy is damaged" in caplog.text


def test_a_damaged_store_is_not_copied(opened: tuple) -> None:
    reader, _, chunks, folder = opened
    (chunk,) = (path for path in (chunks / "7").rglob("*") if path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(DataError, match="2000-01-02T18:00 cannot be read"):
        reader.read(7)
    assert not (folder / "7").exists()


def test_a_full_disk(opened: tuple, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    reader, t, _, folder = opened
    monkeypatch.setattr(chunk_cache.shutil, "disk_usage", lambda path: Usage(10**9, 9 * 10**8, 10**8))
    with caplog.at_level(logging.WARNING):
        for index in (3, 4):
            np.testing.assert_array_equal(reader.read(index)[0], t[index].astype(np.float32))
    assert [path.name for path in folder.iterdir()] == ["0"]
    assert caplog.text.count("takes no more copies") == 1
