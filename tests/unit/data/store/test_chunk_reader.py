"""Tests of the chunk reader: it reads the values that zarr reads into given arrays, and detects damage."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from credit.data.store.chunk_reader import ChunkReader

TIMES, CHANNELS, ROWS, COLUMNS = 3, 5, 300, 256
LZ4 = BloscCodec(cname="lz4", clevel=1, shuffle="shuffle")
CODECS = {"none": [Crc32cCodec()], "lz4": [LZ4, Crc32cCodec()], "lz4 unchecked": [LZ4]}


@pytest.fixture(params=CODECS)
def array(tmp_path: Path, request: pytest.FixtureRequest) -> zarr.Array:
    """Write chunks that need several reads each. Some values are missing."""
    array = zarr.create_array(
        tmp_path / "fields",
        shape=(TIMES, CHANNELS, ROWS, COLUMNS),
        chunks=(1, CHANNELS, ROWS, COLUMNS),
        dtype=np.float32,
        fill_value=np.nan,
        compressors=CODECS[request.param],
    )
    values = np.random.default_rng(0).normal(size=array.shape).round(1)
    values[:, 1, :9] = np.nan
    array[...] = values
    return array


def test_values_equal_those_that_zarr_reads(tmp_path: Path, array: zarr.Array) -> None:
    """The targets are parts of a batch of several steps. One channel is not requested."""
    batch = np.zeros((CHANNELS, 2, ROWS, COLUMNS), dtype=np.float32)
    targets = [batch[channel, 1] if channel != 2 else None for channel in range(CHANNELS)]
    ChunkReader(array, tmp_path / "fields").read(1, targets)
    expected = np.zeros_like(batch)
    expected[:, 1] = array[1]
    expected[2] = 0
    assert np.array_equal(batch, expected, equal_nan=True)


def test_short_reads_are_continued(tmp_path: Path, array: zarr.Array, monkeypatch: pytest.MonkeyPatch) -> None:
    """On network file systems, a signal can cause such a short read."""
    original_preadv = os.preadv

    def read_half(file: int, buffers: list[memoryview], offset: int) -> int:
        return original_preadv(file, [buffers[0][: max(1, len(buffers[0]) // 2 + 1)]], offset)

    monkeypatch.setattr(os, "preadv", read_half)
    fields = np.empty((CHANNELS, ROWS, COLUMNS), dtype=np.float32)
    ChunkReader(array, tmp_path / "fields").read(2, list(fields))
    monkeypatch.undo()
    np.testing.assert_array_equal(fields, array[2])


def test_damaged_chunk_is_an_error(tmp_path: Path, array: zarr.Array) -> None:
    chunks = ChunkReader(array, tmp_path / "fields")
    targets = list(np.empty((CHANNELS, ROWS, COLUMNS), dtype=np.float32))
    path = tmp_path / "fields" / "c" / "1" / "0" / "0" / "0"
    chunk_bytes = path.read_bytes()
    if chunks.has_checksums:
        flipped = bytearray(chunk_bytes)
        flipped[len(chunk_bytes) // 2] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="checksum"):
            chunks.read(1, targets)
    for size in (0, 2, len(chunk_bytes) // 2, len(chunk_bytes) - 2):
        path.write_bytes(chunk_bytes[:size])
        with pytest.raises((ValueError, RuntimeError)):
            chunks.read(1, targets)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        chunks.read(1, targets)
