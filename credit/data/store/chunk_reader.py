"""Reader of the chunks of a training store, directly into the target arrays of the fields.

zarr reads a chunk into one buffer, decodes it into another, and then copies it to its place in a batch. This causes
three to four times the memory traffic that is needed. A chunk of a store has one time, with the fields of its channels
one after the other, so each field can be read into its target array directly.

Letters of shapes: C channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import numpy as np
import zarr
from numcodecs import blosc
from zarr.codecs import BloscCodec, Crc32cCodec

from credit.data.store.chunk_cache import ChunkCache

# Bytes that are read before their checksum is computed: few enough to stay in the processor's cache.
_BYTES_PER_READ = 2**20
# Linux accepts at most 1024 buffers in one call of preadv (IOV_MAX).
_MAX_BUFFERS = 1000
# The CRC32C at the end of a chunk, little-endian.
_CHECKSUM = np.dtype("<u4")
# The uncompressed and the compressed size are at bytes 4 and 12, see
# https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
_BLOSC_HEADER_BYTES = 16


class ChunkReader:
    """Reader of an array (time, channel, latitude, longitude) of float32 with one chunk for each time.

    Args:
        array: zarr array on a disk. Its codecs must be ``bytes``, optionally followed by Blosc and by CRC32C.
        folder: folder of the array.

    Attributes:
        folder: folder of the array. It may be set to another path, where another host has the same chunks.
        has_checksums: True if the chunks end with a checksum, which is then verified at every read.
        cache: cache of node-local copies through which the chunks are read; None reads the original files.
    """

    def __init__(self, array: zarr.Array, folder: Path) -> None:
        # A chunk has the shape (1, C, H, W).
        _, self._num_channels, *self._grid_shape = array.chunks
        # The first codec is always ``bytes``, which stores the values in the order of the array.
        codecs = [type(codec) for codec in array.metadata.codecs[1:]]
        assert codecs in ([], [Crc32cCodec], [BloscCodec], [BloscCodec, Crc32cCodec]), codecs
        self._is_compressed = BloscCodec in codecs
        self.has_checksums = Crc32cCodec in codecs
        self.folder = folder
        self.cache: ChunkCache | None = None

    def read(self, number: int, targets: Sequence[np.ndarray | None]) -> None:
        """Read the fields of one time.

        Args:
            number: number of the chunk, which is the index of its time in the store.
            targets: for each channel a contiguous array (H, W) float32, or None to leave the channel out.

        Raises:
            OSError: if the chunk file does not exist, or cannot be read.
            ValueError, RuntimeError: if the chunk is damaged.
        """
        assert len(targets) == self._num_channels
        path = self._chunk_path(number)
        if self.cache is None:
            self._read_file(path, targets)
        else:
            self.cache.read_cached(str(number), path, lambda cached_path: self._read_file(cached_path, targets))

    def find_fault(self, number: int) -> str | None:
        """Return a description of the problem with a chunk's file, None if it exists in full size.

        The fields are not read.

        Args:
            number: number of the chunk, which is the index of its time in the store.
        """
        plain_bytes = None
        if not self._is_compressed:
            plain_bytes = 4 * self._num_channels * math.prod(self._grid_shape)
        return find_size_fault(self._chunk_path(number), plain_bytes, self.has_checksums)

    def _chunk_path(self, number: int) -> str:
        """Return the path of a chunk's file, which zarr names by the index of the chunk along each axis."""
        return f"{self.folder}/c/{number}/0/0/0"

    def _read_file(self, path: str, targets: Sequence[np.ndarray | None]) -> None:
        """Read a chunk file into one target array (H, W) per channel, None to skip it; for errors see `read`."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if self._is_compressed:
                self._read_compressed(descriptor, targets)
            else:
                self._read_plain(descriptor, targets)
        finally:
            os.close(descriptor)

    def _read_plain(self, descriptor: int, targets: Sequence[np.ndarray | None]) -> None:
        """Read the fields of an uncompressed chunk directly into their targets; for errors see `read`."""
        # The checksum covers all fields, so those that are left out are read as well.
        arrays = []
        for target in targets:
            if target is None:
                target = np.empty(self._grid_shape, dtype=np.float32)
            arrays.append(target)
        # Small fields are read several at a time, about `_BYTES_PER_READ` bytes together.
        arrays_per_read = min(_MAX_BUFFERS, max(1, _BYTES_PER_READ // arrays[0].nbytes))
        checksum = 0
        offset = 0
        for start in range(0, len(arrays), arrays_per_read):
            read_arrays = arrays[start : start + arrays_per_read]
            offset += _read_fully(descriptor, read_arrays, offset)
            # The checksum is computed while the bytes are still in the processor's cache.
            if self.has_checksums:
                for array in read_arrays:
                    checksum = google_crc32c.extend(checksum, array)
        if self.has_checksums:
            stored_checksum = np.empty(1, dtype=_CHECKSUM)
            _read_fully(descriptor, [stored_checksum], offset)
            _require_same_checksum(checksum, int(stored_checksum[0]))

    def _read_compressed(self, descriptor: int, targets: Sequence[np.ndarray | None]) -> None:
        """Read a chunk that was compressed by Blosc, and copy its fields to their targets; for errors see `read`."""
        checksum_bytes = 0
        if self.has_checksums:
            checksum_bytes = _CHECKSUM.itemsize
        size = os.fstat(descriptor).st_size - checksum_bytes
        if size <= 0:
            raise ValueError("it is empty")
        compressed = np.empty(size, dtype=np.uint8)
        if self.has_checksums:
            stored_checksum = np.empty(1, dtype=_CHECKSUM)
            _read_fully(descriptor, [compressed, stored_checksum], 0)
            _require_same_checksum(google_crc32c.value(compressed), int(stored_checksum[0]))
        else:
            _read_fully(descriptor, [compressed], 0)
        fields_CHW = np.empty((self._num_channels, *self._grid_shape), dtype=np.float32)
        # Blosc trusts the sizes in the header, which stores of format 1 do not protect by a checksum.
        header = compressed[:_BLOSC_HEADER_BYTES].tobytes()
        uncompressed_size = int.from_bytes(header[4:8], "little")
        compressed_size = int.from_bytes(header[12:16], "little")
        if uncompressed_size != fields_CHW.nbytes or compressed_size != size:
            raise ValueError(f"it has {size} bytes, which is not its full size, or it has other fields")
        blosc.decompress(compressed, fields_CHW)
        scatter_fields(fields_CHW, targets)


def find_size_fault(path: str, plain_bytes: int | None, has_checksum: bool) -> str | None:
    """Return a description of the problem with a chunk's file, None if the file exists in full size.

    The values are not read.

    Args:
        path: path of the file.
        plain_bytes: size of the values in bytes if they are not compressed. None for values compressed by Blosc; then
            the size is taken from Blosc's header in the file.
        has_checksum: True if a CRC32C checksum follows the values.
    """
    # The size that the file should have follows from the shape, or is in the header of Blosc.
    try:
        if plain_bytes is not None:
            size = os.stat(path).st_size
            expected_size = plain_bytes
        else:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                size = os.fstat(descriptor).st_size
                header = os.pread(descriptor, _BLOSC_HEADER_BYTES, 0)
            finally:
                os.close(descriptor)
            if len(header) < _BLOSC_HEADER_BYTES:
                return f"its chunk ends after {size} bytes"
            expected_size = int.from_bytes(header[12:16], "little")
    except FileNotFoundError:
        return "its chunk is lost"
    except OSError as error:
        return str(error)
    if has_checksum:
        expected_size += _CHECKSUM.itemsize
    if size != expected_size:
        return f"its chunk has {size} bytes instead of {expected_size}"
    return None


def scatter_fields(fields_CHW: np.ndarray, targets: Sequence[np.ndarray | None]) -> None:
    """Copy each of the fields (C, H, W) to its target array (H, W); a target None leaves the field out."""
    for target, field in zip(targets, fields_CHW, strict=True):
        if target is not None:
            target[...] = field


def _read_fully(descriptor: int, arrays: Sequence[np.ndarray], offset: int) -> int:
    """Fill arrays one after the other with the bytes of a file from `offset` on, and return the number of bytes.

    Raises:
        ValueError: if the file ends before the arrays are full.
    """
    buffers = [memoryview(array).cast("B") for array in arrays if array.nbytes]
    position = offset
    while buffers:
        count = os.preadv(descriptor, buffers, position)
        if count == 0:
            raise ValueError(f"it ends after {position} bytes")
        position += count
        # A call may read less than was requested; drop the buffers that are full, and cut the next one, which may be
        # partly filled.
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    return position - offset


def _require_same_checksum(computed: int, stored: int) -> None:
    """Raise `ValueError` if the CRC32C of the bytes that were read is not the one that was written with them."""
    if computed != stored:
        raise ValueError(f"stored and computed checksum do not match: {stored:08x}, {computed:08x}")
