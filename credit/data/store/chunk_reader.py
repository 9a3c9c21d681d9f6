"""Reader of the chunks of a training store, directly into the target arrays of the fields.

zarr reads a chunk into one buffer, decodes it into a second buffer, and then copies it into the batch. This causes
three to four times the memory traffic that is needed. A chunk of a store contains the fields of all channels of one
time, one after the other, so each field can be read into its target array directly.

The fields of a time may also be divided into blocks of rows and columns (``preprocess.blocks``). Then the file of a
time is a shard of the zarr 3 codec ``sharding_indexed``. The shard begins with an index of the position and the size of
each block. Each block has a separate checksum, so that a rank can read only the blocks in its part of the grid. All
blocks have the same size; the last blocks may extend beyond the grid, where their values are missing.

Letters of shapes: C channels, H latitude rows, W longitude columns, h and w rows and columns of a part of the grid.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import google_crc32c
import numpy as np
import zarr
from numcodecs import blosc
from zarr.codecs import BloscCodec, Crc32cCodec, ShardingCodec

from credit.data.store.chunk_cache import ChunkCache

# Number of bytes that are read before their checksum is computed, so that they are still in the CPU cache.
_BYTES_PER_READ = 2**20
# Linux accepts at most 1024 buffers in one call of preadv (IOV_MAX).
_MAX_BUFFERS = 1000
# The CRC32C at the end of a chunk, little-endian.
_CHECKSUM = np.dtype("<u4")
# The uncompressed and the compressed size are at bytes 4 and 12, see
# https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
_BLOSC_HEADER_BYTES = 16
# An entry of the index of a shard: position and size of a block in bytes.
_INDEX_ENTRY = np.dtype([("offset", "<u8"), ("size", "<u8")])
# Value of position and size in the index for a block that was not written.
_NO_BLOCK = 2**64 - 1


class ChunkReader:
    """Reader of an array (time, channel, latitude, longitude) of float32 with one file for each time.

    Args:
        array: zarr array on a file system. The file of a time is a chunk, or a shard of several chunks (blocks) that
            begins with an index. The codecs of a chunk must be ``bytes``, optionally followed by Blosc and by CRC32C.
        folder: folder of the array.

    Attributes:
        block_shape: number of rows and columns of a block; the shape of the grid if the fields are not divided.
        num_blocks: number of blocks along the latitudes and along the longitudes.
        folder: folder of the array. It may be set to a different path to the same chunks on another host.
        has_checksums: True if the chunks end with a checksum, which is then verified at every read.
        cache: cache of node-local copies from which the chunks are read; None to read the original files.
    """

    def __init__(self, array: zarr.Array, folder: Path) -> None:
        _, self._num_channels, *self._grid_shape = array.shape
        # The shape of a chunk is (1, C, rows of a block, columns of a block).
        block_rows, block_columns = array.chunks[2:]
        self.block_shape = (block_rows, block_columns)
        # `-(-a // b)` is a / b, rounded up.
        self.num_blocks = (-(-self._grid_shape[0] // block_rows), -(-self._grid_shape[1] // block_columns))
        chunk_codecs = array.metadata.codecs
        self._is_sharded = isinstance(chunk_codecs[0], ShardingCodec)
        if self._is_sharded:
            assert chunk_codecs[0].index_location.value == "start", chunk_codecs[0]
            chunk_codecs = chunk_codecs[0].codecs
        # The first codec is always ``bytes``, which stores the values in the order of the array.
        codecs = [type(codec) for codec in chunk_codecs[1:]]
        assert codecs in ([], [Crc32cCodec], [BloscCodec], [BloscCodec, Crc32cCodec]), codecs
        self._is_compressed = BloscCodec in codecs
        self.has_checksums = Crc32cCodec in codecs
        self.folder = folder
        self.cache: ChunkCache | None = None

    def read(
        self, number: int, targets: Sequence[np.ndarray | None], grid_part: tuple[slice, slice] | None = None
    ) -> None:
        """Read the fields of one time, or a part of them, into the arrays `targets`.

        Args:
            number: number of the chunk, which is the index of its time in the store.
            targets: for each channel, a contiguous array (H, W) float32, or (h, w) if `grid_part` is given; None to
                skip the channel.
            grid_part: rows and columns to read, with a start and a stop; None to read the complete fields. If the
                fields are divided into blocks, only the blocks that overlap the part are read.

        Raises:
            OSError: if the chunk file does not exist, or cannot be read.
            ValueError, RuntimeError: if a block that is read is damaged; the message names the block.
        """
        assert len(targets) == self._num_channels
        path = self._chunk_path(number)
        if self.cache is None:
            self._read_file(path, targets, grid_part)
        else:
            self.cache.read_cached(
                str(number), path, lambda cached_path: self._read_file(cached_path, targets, grid_part)
            )

    def find_fault(self, number: int) -> str | None:
        """Return a description of the problem with a chunk's file; None if the file exists and has its full size.

        The fields are not read.

        Args:
            number: number of the chunk, which is the index of its time in the store.
        """
        if self._is_sharded:
            return self._find_shard_fault(self._chunk_path(number))
        uncompressed_bytes = None
        if not self._is_compressed:
            uncompressed_bytes = self._uncompressed_block_bytes
        return find_size_fault(self._chunk_path(number), uncompressed_bytes, self.has_checksums)

    @property
    def _uncompressed_block_bytes(self) -> int:
        """Size in bytes of the uncompressed values of a block, or of the complete fields if they are not divided."""
        return 4 * self._num_channels * math.prod(self.block_shape)

    def _find_shard_fault(self, path: str) -> str | None:
        """Return a description of the problem with a file of divided fields, None if it has none; see `find_fault`."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                size = os.fstat(descriptor).st_size
                index = self._read_index(descriptor)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return "its chunk is lost"
        except (OSError, ValueError) as error:
            return str(error)
        expected_size = int((index["offset"] + index["size"]).max())
        if size != expected_size:
            return f"its chunk has {size} bytes instead of {expected_size}"
        return None

    def _chunk_path(self, number: int) -> str:
        """Return the path of a chunk's file, which zarr derives from the index of the chunk along each axis."""
        return f"{self.folder}/c/{number}/0/0/0"

    def _read_file(
        self, path: str, targets: Sequence[np.ndarray | None], grid_part: tuple[slice, slice] | None
    ) -> None:
        """Read the fields, or a part of them, from a file into the targets; for arguments and errors see `read`."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if self._is_sharded or grid_part is not None:
                self._read_blocks(descriptor, targets, grid_part)
            elif self._is_compressed:
                fields_CHW = self._read_compressed(descriptor, 0, os.fstat(descriptor).st_size)
                scatter_fields(fields_CHW, targets)
            else:
                self._read_uncompressed(descriptor, targets)
        finally:
            os.close(descriptor)

    def _read_blocks(
        self, descriptor: int, targets: Sequence[np.ndarray | None], grid_part: tuple[slice, slice] | None
    ) -> None:
        """Read the blocks that overlap a part, and copy the overlaps to the targets; for arguments see `read`."""
        if grid_part is None:
            grid_part = (slice(0, self._grid_shape[0]), slice(0, self._grid_shape[1]))
        if self._is_sharded:
            index = self._read_index(descriptor)
        else:
            index = np.array([[(0, os.fstat(descriptor).st_size)]], dtype=_INDEX_ENTRY)
        row_overlaps = list(_list_overlaps(grid_part[0], self.block_shape[0]))
        column_overlaps = list(_list_overlaps(grid_part[1], self.block_shape[1]))
        for (row, block_rows, part_rows), (column, block_columns, part_columns) in itertools.product(
            row_overlaps, column_overlaps
        ):
            offset, size = (int(value) for value in index[row, column])
            # Each block overlaps the part in some rows and columns.
            block_part = (block_rows, block_columns)
            block_targets = [None if target is None else target[part_rows, part_columns] for target in targets]
            try:
                if self._is_compressed:
                    block_CHW = self._read_compressed(descriptor, offset, size)
                    scatter_fields(block_CHW[:, *block_part], block_targets)
                else:
                    self._read_uncompressed_block(descriptor, offset, size, block_targets, block_part)
            except (ValueError, RuntimeError) as error:
                if not self._is_sharded:
                    raise
                raise ValueError(f"block {row}, {column} of rows and columns: {error}") from error

    def _read_index(self, descriptor: int) -> np.ndarray:
        """Return the position and the size in bytes of each block of a file, an array of `num_blocks` entries.

        Raises:
            ValueError: if the index is damaged, or a block was not written.
        """
        index = np.empty(self.num_blocks, dtype=_INDEX_ENTRY)
        stored_checksum = np.empty(1, dtype=_CHECKSUM)
        index_bytes = index.view(np.uint8)
        _read_fully(descriptor, [index_bytes, stored_checksum], 0)
        try:
            _require_same_checksum(google_crc32c.value(index_bytes.tobytes()), int(stored_checksum[0]))
        except ValueError as error:
            raise ValueError(f"index of its blocks: {error}") from error
        if (index["offset"] == _NO_BLOCK).any():
            raise ValueError("one of its blocks was not written")
        return index

    def _read_uncompressed_block(
        self,
        descriptor: int,
        offset: int,
        size: int,
        targets: Sequence[np.ndarray | None],
        block_part: tuple[slice, slice],
    ) -> None:
        """Read an uncompressed block, and copy some of its rows and columns to the targets.

        Args:
            descriptor: descriptor of the open file.
            offset: position of the block in the file in bytes.
            size: size of the block in bytes.
            targets: for each channel, an array with the shape of `block_part`, or None to skip the channel.
            block_part: rows and columns of the block that are copied.

        Raises:
            ValueError: if the block is damaged.
        """
        checksum_bytes = _CHECKSUM.itemsize if self.has_checksums else 0
        if size != self._uncompressed_block_bytes + checksum_bytes:
            raise ValueError(f"it has {size} bytes instead of {self._uncompressed_block_bytes + checksum_bytes}")
        # The buffer fits into the CPU cache, so that copying from it is fast.
        field_bytes = 4 * math.prod(self.block_shape)
        channels_per_read = max(1, min(self._num_channels, _BYTES_PER_READ // field_bytes))
        buffer_CHW = np.empty((channels_per_read, *self.block_shape), dtype=np.float32)
        checksum = 0
        for start in range(0, self._num_channels, channels_per_read):
            read_targets = targets[start : start + channels_per_read]
            fields_CHW = buffer_CHW[: len(read_targets)]
            offset += _read_fully(descriptor, [fields_CHW], offset)
            if self.has_checksums:
                checksum = google_crc32c.extend(checksum, fields_CHW)
            scatter_fields(fields_CHW[:, *block_part], read_targets)
        if self.has_checksums:
            stored_checksum = np.empty(1, dtype=_CHECKSUM)
            _read_fully(descriptor, [stored_checksum], offset)
            _require_same_checksum(checksum, int(stored_checksum[0]))

    def _read_uncompressed(self, descriptor: int, targets: Sequence[np.ndarray | None]) -> None:
        """Read the fields of an uncompressed chunk directly into the targets; for errors see `read`."""
        # The checksum covers all fields, so the fields of skipped channels must also be read.
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
            # The checksum is computed while the bytes are still in the CPU cache.
            if self.has_checksums:
                for array in read_arrays:
                    checksum = google_crc32c.extend(checksum, array)
        if self.has_checksums:
            stored_checksum = np.empty(1, dtype=_CHECKSUM)
            _read_fully(descriptor, [stored_checksum], offset)
            _require_same_checksum(checksum, int(stored_checksum[0]))

    def _read_compressed(self, descriptor: int, offset: int, size: int) -> np.ndarray:
        """Return the fields of a chunk or block that was compressed by Blosc, (C, h, w) float32.

        Args:
            descriptor: descriptor of the open file.
            offset: position of the chunk in the file in bytes.
            size: size of the chunk in bytes, including its checksum.

        Raises:
            ValueError, RuntimeError: if the chunk is damaged.
        """
        checksum_bytes = 0
        if self.has_checksums:
            checksum_bytes = _CHECKSUM.itemsize
        size -= checksum_bytes
        if size <= 0:
            raise ValueError("it is empty")
        compressed = np.empty(size, dtype=np.uint8)
        if self.has_checksums:
            stored_checksum = np.empty(1, dtype=_CHECKSUM)
            _read_fully(descriptor, [compressed, stored_checksum], offset)
            _require_same_checksum(google_crc32c.value(compressed), int(stored_checksum[0]))
        else:
            _read_fully(descriptor, [compressed], offset)
        fields_CHW = np.empty((self._num_channels, *self.block_shape), dtype=np.float32)
        # Blosc does not verify the sizes in its header, and stores of format 1 have no checksum for the header.
        header = compressed[:_BLOSC_HEADER_BYTES].tobytes()
        uncompressed_size = int.from_bytes(header[4:8], "little")
        compressed_size = int.from_bytes(header[12:16], "little")
        if uncompressed_size != fields_CHW.nbytes or compressed_size != size:
            raise ValueError(f"it has {size} bytes, which is not its full size, or it has different fields")
        blosc.decompress(compressed, fields_CHW)
        return fields_CHW


def find_size_fault(path: str, uncompressed_bytes: int | None, has_checksum: bool) -> str | None:
    """Return a description of the problem with a chunk's file; None if the file exists and has its full size.

    The values are not read.

    Args:
        path: path of the file.
        uncompressed_bytes: size of the values in bytes if they are not compressed; None if the values are compressed by
            Blosc, so that the size is read from the Blosc header in the file.
        has_checksum: True if a CRC32C checksum follows the values.
    """
    # The expected size of the file is determined by the shape, or by the header of Blosc.
    try:
        if uncompressed_bytes is not None:
            size = os.stat(path).st_size
            expected_size = uncompressed_bytes
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
    """Copy each of the fields (C, H, W) to its target array (H, W); skip fields whose target is None."""
    for target, field in zip(targets, fields_CHW, strict=True):
        if target is not None:
            target[...] = field


def _list_overlaps(cells: slice, block_length: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield each block that overlaps `cells` along an axis, and the overlap.

    The values are the block's number, the overlap as a slice of the block, and the overlap as a slice of `cells`.

    Args:
        cells: consecutive cells of the axis, with a start and a stop.
        block_length: number of cells in a block.
    """
    for number in range(cells.start // block_length, -(-cells.stop // block_length)):
        block_start = number * block_length
        start = max(cells.start, block_start)
        stop = min(cells.stop, block_start + block_length)
        yield number, slice(start - block_start, stop - block_start), slice(start - cells.start, stop - cells.start)


def _read_fully(descriptor: int, arrays: Sequence[np.ndarray], offset: int) -> int:
    """Fill the arrays one after the other with the bytes of a file, starting at `offset`; return the number of bytes.

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
        # A call may read fewer bytes than requested. Drop the full buffers, and cut off the filled part of the next
        # buffer.
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    return position - offset


def _require_same_checksum(computed: int, stored: int) -> None:
    """Raise `ValueError` if the computed CRC32C of the bytes differs from the CRC32C that is stored with them."""
    if computed != stored:
        raise ValueError(f"stored and computed checksum do not match: {stored:08x}, {computed:08x}")
