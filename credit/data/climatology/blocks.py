"""Blocks in which a climatology is fitted, and chunks in which a training store keeps it."""

from __future__ import annotations

import math

from credit.data.climatology.fit import ClimatologyPlan

# Memory for the sums and fields of a block while it is fitted.
BLOCK_BYTES = 4 * 2**30
CHUNK_BYTES = 4 * 2**20
# A float64 sum and the float32 field that it becomes.
_BYTES_PER_VALUE = 8 + 4


def block_shape(plan: ClimatologyPlan, num_channels: int, cells: int) -> tuple[int, int, int]:
    """Return how many times of the day, parts of the year and channels are fitted at once.

    Neighbouring parts of the year need mostly the same times, and a read brings all channels. So a block has all
    channels and as many parts as the memory allows, and fewer channels only where one part is too large.
    """
    max_fields = BLOCK_BYTES // (_BYTES_PER_VALUE * cells)
    min_parts = plan.shape[1] if plan.kind == "harmonic" else 1
    chunk_channels = channels_per_chunk(num_channels, cells)
    # Blocks consist of whole chunks, so that no two processes write the same chunk.
    block_chunks = max(1, max_fields // min_parts // chunk_channels)
    block_channels = min(num_channels, block_chunks * chunk_channels)
    block_parts = max(min_parts, min(plan.shape[1], max_fields // block_channels))
    return 1, block_parts, block_channels


def channels_per_chunk(num_channels: int, cells: int) -> int:
    """Return how many channels a chunk of the store has."""
    return max(1, min(num_channels, CHUNK_BYTES // (4 * cells)))


def estimate_bytes(plan: ClimatologyPlan, num_channels: int, grid_shape: tuple[int, int]) -> tuple[int, int]:
    """Return the most bytes that a climatology takes in a store, and in the memory of a process that fits a block."""
    times_of_day, num_parts = plan.shape
    cells = math.prod(grid_shape)
    _, block_parts, block_channels = block_shape(plan, num_channels, cells)
    disk_bytes = 4 * times_of_day * num_parts * num_channels * cells
    # Besides the block there are two float32 copies of the fields of one time.
    memory_bytes = cells * (_BYTES_PER_VALUE * block_parts * block_channels + 8 * num_channels)
    return disk_bytes, memory_bytes
