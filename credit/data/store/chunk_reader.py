"""Chunks of a training store, read straight to where their fields are needed.

zarr reads a chunk into memory of its own, decodes it into more, and then it is copied to its place in a batch: three to
four times the memory traffic of the bytes themselves. A store's chunk is one time, its fields behind each other, so
each can go to its place directly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import google_crc32c
import numpy as np
import zarr
from numcodecs import blosc
from zarr.codecs import BloscCodec, Crc32cCodec

from credit.data.store.chunk_cache import ChunkCache

# bytes that are read before they are checked: few enough to be in the processor's cache still
_STRETCH = 2**20
# a system call takes 1024 places
_MOST_AT_ONCE = 1000
_CHECKSUM = np.dtype("<u4")
# uncompressed and compressed size are at bytes 4 and 12, https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
_BLOSC_HEADER = 16


class ChunkReader:
    """The chunks of an array (time, channel, latitude, longitude) of float32 with a chunk a time.

    Args:
        array: the array, on a disk; its codecs are bytes, perhaps Blosc, perhaps CRC32C.
        folder: where it lies.

    Attributes:
        folder: the same; may be changed to where another host has the same chunks.
        checked: whether the chunks end with a checksum, which is verified.
        copies: through which to read; None reads the files themselves.
    """

    def __init__(self, array: zarr.Array, folder: Path) -> None:
        _, self._channels, *self._cells = array.chunks
        kinds = [type(codec) for codec in array.metadata.codecs[1:]]
        assert kinds in ([], [Crc32cCodec], [BloscCodec], [BloscCodec, Crc32cCodec]), kinds
        self._compressed, self.checked = BloscCodec in kinds, Crc32cCodec in kinds
        self.folder = folder
        self.copies: ChunkCache | None = None

    def read(self, number: int, places: Sequence[np.ndarray | None]) -> None:
        """Read the fields of one time.

        Args:
            number: of the chunk.
            places: where each channel's field goes, (H, W) float32, contiguous; None where it is not wanted.

        Raises:
            OSError: if there is no such chunk, or it cannot be read.
            ValueError, RuntimeError: if it is damaged.
        """
        assert len(places) == self._channels
        path = f"{self.folder}/c/{number}/0/0/0"
        if self.copies is None:
            self._read_file(path, places)
        else:
            self.copies.read(str(number), path, lambda one: self._read_file(one, places))

    def find_fault(self, number: int) -> str | None:
        """Return what is wrong with the file of a chunk, None where its size is right; its fields are not read."""
        plain_bytes = None if self._compressed else 4 * self._channels * math.prod(self._cells)
        return find_size_fault(f"{self.folder}/c/{number}/0/0/0", plain_bytes, self.checked)

    def _read_file(self, path: str, places: Sequence[np.ndarray | None]) -> None:
        file = os.open(path, os.O_RDONLY)
        try:
            if self._compressed:
                self._read_compressed(file, places)
            else:
                self._read_plain(file, places)
        finally:
            os.close(file)

    def _read_plain(self, file: int, places: Sequence[np.ndarray | None]) -> None:
        targets = [np.empty(self._cells, dtype=np.float32) if place is None else place for place in places]
        checksum = offset = 0
        for stretch in _stretches(targets):
            offset += _read_whole(file, stretch, offset)
            for target in stretch if self.checked else ():
                checksum = google_crc32c.extend(checksum, target)
        if self.checked:
            stored = np.empty(1, dtype=_CHECKSUM)
            _read_whole(file, [stored], offset)
            _compare(checksum, stored)

    def _read_compressed(self, file: int, places: Sequence[np.ndarray | None]) -> None:
        size = os.fstat(file).st_size - (_CHECKSUM.itemsize if self.checked else 0)
        if size <= 0:
            raise ValueError("it is empty")
        raw, stored = np.empty(size, dtype=np.uint8), np.empty(1 if self.checked else 0, dtype=_CHECKSUM)
        _read_whole(file, [raw, stored], 0)
        if self.checked:
            _compare(google_crc32c.value(raw), stored)
        fields = np.empty((self._channels, *self._cells), dtype=np.float32)
        # Blosc reads as far as the chunk's own header says, which stores of format 1 do not protect
        header = raw[:_BLOSC_HEADER].tobytes()
        if [int.from_bytes(header[at : at + 4], "little") for at in (4, 12)] != [fields.nbytes, size]:
            raise ValueError(f"it has {size} bytes, or other fields")
        blosc.decompress(raw, fields)
        scatter_fields(fields, places)


def find_size_fault(path: str, plain_bytes: int | None, checked: bool) -> str | None:
    """Return what is wrong with a chunk's file, None where it is there in its full size; its values are not read.

    Args:
        path: the file.
        plain_bytes: of the values; None where Blosc compresses them, whose header says how long the file is.
        checked: whether a CRC32C follows.
    """
    try:
        if plain_bytes is not None:
            size, expected = os.stat(path).st_size, plain_bytes
        else:
            file = os.open(path, os.O_RDONLY)
            try:
                size, header = os.fstat(file).st_size, os.pread(file, _BLOSC_HEADER, 0)
            finally:
                os.close(file)
            if len(header) < _BLOSC_HEADER:
                return f"its chunk ends after {size} bytes"
            expected = int.from_bytes(header[12:16], "little")
    except FileNotFoundError:
        return "its chunk is lost"
    except OSError as error:
        return str(error)
    expected += _CHECKSUM.itemsize if checked else 0
    return None if size == expected else f"its chunk has {size} bytes instead of {expected}"


def scatter_fields(fields: np.ndarray, places: Sequence[np.ndarray | None]) -> None:
    """Copy fields (C, H, W) to their C places; None where one is not wanted."""
    for place, field in zip(places, fields, strict=True):
        if place is not None:
            place[...] = field


def _stretches(targets: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
    at_once = min(_MOST_AT_ONCE, max(1, _STRETCH // targets[0].nbytes))
    for first in range(0, len(targets), at_once):
        yield targets[first : first + at_once]


def _read_whole(file: int, targets: Sequence[np.ndarray], offset: int) -> int:
    """Fill arrays with what follows `offset`, and return how many bytes that is; a system call may bring less."""
    left = [memoryview(target).cast("B") for target in targets if target.nbytes]
    place = offset
    while left:
        count = os.preadv(file, left, place)
        if count == 0:
            raise ValueError(f"it ends after {place} bytes")
        place += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return place - offset


def _compare(computed: int, stored: np.ndarray) -> None:
    if computed != int(stored[0]):
        raise ValueError(f"stored and computed checksum do not match: {int(stored[0]):08x}, {computed:08x}")
