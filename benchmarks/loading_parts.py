"""Time to read whole fields, and a quarter of each field, from stores with and without blocks (``preprocess.blocks``).

The files are in the page cache, so the times are those of copies, checksums and system calls. The values are random, so
they are stored without compression. Run it on another version of the package, with the same folder, to compare the
reading of a store without blocks: ``python benchmarks/loading_parts.py FOLDER --rounds 20 --only whole``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec

from credit.data.store.chunk_reader import ChunkReader

CHANNELS, ROWS, COLUMNS, TIMES = 70, 181, 360, 8
# Name of a store, and the number of its blocks of rows.
STORES = {"whole": 1, "blocks": 4}


def write_fields(path: Path, num_blocks: int) -> zarr.Array:
    """Return an array of random fields with the layout of a store; it is written if it does not exist."""
    if path.exists():
        return zarr.open_array(path, mode="r")
    # `-(-a // b)` is a / b, rounded up.
    block_rows = -(-ROWS // num_blocks)
    shards = None
    if num_blocks > 1:
        shards = {"shape": (1, CHANNELS, num_blocks * block_rows, COLUMNS), "index_location": "start"}
    array = zarr.create_array(
        path,
        shape=(TIMES, CHANNELS, ROWS, COLUMNS),
        chunks=(1, CHANNELS, block_rows, COLUMNS),
        shards=shards,
        dtype=np.float32,
        fill_value=np.nan,
        compressors=[Crc32cCodec()],
    )
    generator = np.random.default_rng(0)
    for index in range(TIMES):
        array[index] = generator.normal(size=(CHANNELS, ROWS, COLUMNS)).astype(np.float32)
    return array


def build_reads(folder: Path, only: str | None) -> dict[str, Callable[[int], None]]:
    """Return name -> function to measure, which reads the fields of a time (by index) into preallocated memory."""
    reads: dict[str, Callable[[int], None]] = {}
    for name, num_blocks in STORES.items():
        if only not in (None, name):
            continue
        reader = ChunkReader(write_fields(folder / name, num_blocks), folder / name)
        fields_CHW = np.empty((CHANNELS, ROWS, COLUMNS), dtype=np.float32)
        targets = list(fields_CHW)
        reads[f"{name}: all rows"] = lambda index, reader=reader, targets=targets: reader.read(index, targets)
        if only is None:
            part = (slice(0, -(-ROWS // 4)), slice(0, COLUMNS))
            part_targets = list(fields_CHW[:, : part[0].stop].copy())
            reads[f"{name}: a quarter of the rows"] = lambda index, reader=reader, targets=part_targets, part=part: (
                reader.read(index, targets, part)
            )
    return reads


def main() -> None:
    """Print the median and the quartiles of the milliseconds per time of each read, over alternating rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for about 300 MB of fields")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=STORES, help="read only this store, and all rows of it")
    arguments = parser.parse_args()
    reads = build_reads(arguments.folder, arguments.only)
    milliseconds: dict[str, list[float]] = {name: [] for name in reads}
    # The first round fills the page cache and is not counted.
    for round_number in range(arguments.rounds + 1):
        for name, read in reads.items():
            start = time.perf_counter()
            for index in range(TIMES):
                read(index)
            if round_number > 0:
                milliseconds[name].append(1000 * (time.perf_counter() - start) / TIMES)
    for name, values in milliseconds.items():
        first, median, third = statistics.quantiles(values, n=4)
        print(f"{name}: {median:.2f} ms ({first:.2f} to {third:.2f})")


if __name__ == "__main__":
    main()
