"""Blocks in which a climatology is fitted, and chunks in which a training store contains it.

Letters of shapes: T times of the day, K parts of the year (or harmonics), C channels, H latitude rows, W longitude
columns. See `credit.data.climatology.climatology.Climatology` for times of the day and parts of the year.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import zarr

from credit.data.climatology.fit import ClimatologyPlan
from credit.data.store.chunk_reader import find_size_fault
from credit.data.store.store_reader import READ_ERRORS

# Memory in bytes for the sums and fields of a block while it is fitted.
BLOCK_BYTES = 4 * 2**30
# Size in bytes of a chunk in the store before it is compressed.
CHUNK_BYTES = 4 * 2**20
# Memory of a fitted value in bytes: its float64 sum and its float32 result.
_BYTES_PER_VALUE = 8 + 4
# Block of a climatology: slices of the times of the day, of the parts of the year and of the channels.
Block = tuple[slice, slice, slice]


def choose_block_shape(plan: ClimatologyPlan, num_channels: int, cells: int) -> tuple[int, int, int]:
    """Return the shape of a block: the numbers of times of the day, parts of the year, and channels.

    All fields of a block are fitted at once. Neighbouring parts of the year are mostly averages over the same times,
    and reading a time reads all its channels. Therefore a block contains all channels, and as many parts of the year as
    fit into `BLOCK_BYTES`. It contains fewer channels only if a single part of the year with all channels does not fit.

    Args:
        plan: the plan of the fit.
        num_channels: number of channels of the climatology.
        cells: number of cells of the grid.
    """
    max_fields = BLOCK_BYTES // (_BYTES_PER_VALUE * cells)
    # All harmonics are fitted together from the same sums.
    min_parts = plan.shape[1] if plan.kind == "harmonic" else 1
    chunk_channels = count_channels_per_chunk(num_channels, cells)
    # Blocks consist of complete chunks, so that no two processes write the same chunk.
    block_chunks = max(1, max_fields // min_parts // chunk_channels)
    block_channels = min(num_channels, block_chunks * chunk_channels)
    block_parts = max(min_parts, min(plan.shape[1], max_fields // block_channels))
    # A block contains one time of the day, because times of the day are fitted to different times of the period.
    return 1, block_parts, block_channels


def count_channels_per_chunk(num_channels: int, cells: int) -> int:
    """Return the number of channels in a chunk of the stored climatology, at least 1.

    Args:
        num_channels: number of channels of the climatology.
        cells: number of cells of the grid.
    """
    return max(1, min(num_channels, CHUNK_BYTES // (4 * cells)))


def estimate_fit_bytes(plan: ClimatologyPlan, num_channels: int, grid_shape: tuple[int, int]) -> tuple[int, int]:
    """Estimate the disk space and the memory that the fit of a climatology needs.

    Args:
        plan: the plan of the fit.
        num_channels: number of channels of the climatology.
        grid_shape: (H, W), numbers of rows and columns of the grid.

    Returns:
        Two upper bounds in bytes: the size of the climatology in the store, and the memory of a process that fits a
        block.
    """
    times_of_day, num_parts = plan.shape
    cells = math.prod(grid_shape)
    _, block_parts, block_channels = choose_block_shape(plan, num_channels, cells)
    disk_bytes = 4 * times_of_day * num_parts * num_channels * cells
    # In addition to the block, there are two float32 copies of the fields of one time.
    memory_bytes = cells * (_BYTES_PER_VALUE * block_parts * block_channels + 8 * num_channels)
    return disk_bytes, memory_bytes


def list_chunk_files(path: Path, fields: zarr.Array, block: Block) -> Iterator[Path]:
    """Yield the paths of the chunk files of a block.

    Args:
        path: folder of the training store.
        fields: the array ``climatology/fields`` of the store, (T, K, C, H, W).
        block: the block, which consists of complete chunks.
    """
    # On each axis, the indices of the chunks that the slice of the block covers.
    indices_of_axis = []
    for span, length in zip(block, fields.chunks[:3], strict=True):
        indices_of_axis.append(range(span.start // length, math.ceil(span.stop / length)))
    # zarr names a chunk file by the index of the chunk on each axis. A chunk contains all rows and columns.
    for time_of_day, part, channel_chunk in itertools.product(*indices_of_axis):
        yield path / "climatology" / "fields" / "c" / str(time_of_day) / str(part) / str(channel_chunk) / "0" / "0"


def is_block_written(path: Path, fields: zarr.Array, block: Block) -> bool:
    """Return True if all chunk files of a block exist with their full size. The values are not read.

    Args:
        path: folder of the training store.
        fields: the array ``climatology/fields`` of the store, (T, K, C, H, W).
        block: the block, which consists of complete chunks.
    """
    for file in list_chunk_files(path, fields, block):
        fault = find_size_fault(str(file), uncompressed_bytes=None, has_checksum=True)
        if fault is not None:
            return False
    return True


def is_block_readable(fields: zarr.Array, block: Block) -> bool:
    """Return True if the fields of a block can be read. Reading verifies the checksum of every chunk.

    Args:
        fields: the array ``climatology/fields`` of the store, (T, K, C, H, W).
        block: the block.
    """
    try:
        # Only errors are of interest; the values are not used.
        fields[block]
    except READ_ERRORS:
        return False
    return True
