"""Estimate of the number of bytes and the time for fetching fields from remote stores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from credit.data.sources.source_reader import SourceReader
from credit.errors import DataError, UnavailableError


@dataclass(frozen=True)
class ArrayEstimate:
    """Number and size of the chunks to fetch from one array.

    Attributes:
        url: address of the store.
        name: name of the array.
        num_chunks: number of chunks to fetch.
        chunk_bytes: mean size in bytes of the compressed chunks that have been fetched.
    """

    url: str
    name: str
    num_chunks: int
    chunk_bytes: float


@dataclass(frozen=True)
class FetchEstimate:
    """Chunks to fetch from remote stores, and the download rate that was measured while fetching the first time.

    Attributes:
        arrays: the chunks to fetch from each array of all stores.
        measured_bytes: number of bytes that were fetched to read the first time.
        measured_seconds: duration in seconds of fetching and decompressing the first time.
    """

    arrays: list[ArrayEstimate]
    measured_bytes: int
    measured_seconds: float

    @property
    def total_bytes(self) -> float:
        """Estimated number of bytes to fetch."""
        return sum(array.num_chunks * array.chunk_bytes for array in self.arrays)

    @property
    def total_seconds(self) -> float:
        """Estimated duration of fetching in seconds at the measured rate; `measured_bytes` must not be 0."""
        return self.total_bytes * self.measured_seconds / self.measured_bytes

    def describe(self) -> str:
        """Return a multi-line description of the estimate."""
        lines = []
        for url in dict.fromkeys(array.url for array in self.arrays):
            lines.append(f"{url}:")
            for array in self.arrays:
                if array.url == url:
                    num_bytes = array.num_chunks * array.chunk_bytes
                    lines.append(
                        f"  {array.name:32s} {array.num_chunks:>9d} chunks of {format_bytes(array.chunk_bytes):>9s} "
                        f"{format_bytes(num_bytes):>10s}"
                    )
        num_chunks = sum(array.num_chunks for array in self.arrays)
        if self.measured_bytes == 0:
            lines.append(
                f"to fetch: at most {num_chunks} chunks, {format_bytes(self.total_bytes)}; no chunk was fetched to "
                "read the first time, so the rate is not known"
            )
            return "\n".join(lines)
        rate = self.measured_bytes / self.measured_seconds
        lines.append(
            f"to fetch: {num_chunks} chunks, {format_bytes(self.total_bytes)}, in about "
            f"{format_seconds(self.total_seconds)} at the {format_bytes(rate)}/s of the first "
            f"{format_bytes(self.measured_bytes)}"
        )
        return "\n".join(lines)


def estimate_fetch(sources: SourceReader, indices: Sequence[int]) -> FetchEstimate:
    """Estimate the number of bytes and seconds for fetching the fields of some times.

    The first of these times is fetched, to measure the download rate. Its chunks remain in memory until other times are
    read or ``sources.fetch_plan`` is stopped.

    Args:
        sources: reader of the sources.
        indices: indices of the times in ``sources.times``, at least one.

    Raises:
        UnavailableError: if a server does not answer.
    """
    plan = sources.fetch_plan
    first_chunks = plan.find_chunks(indices[:1])
    bytes_before = {key: needed.store.fetched_bytes[key[1]] for key, needed in first_chunks.items()}
    start = time.perf_counter()
    try:
        plan.fetch_ahead(indices[:1], [], 0)
        # If the values of a time are already in a cache of its file, reading needs no chunk.
        for needed in first_chunks.values():
            needed.store.wait()
        sources.read(indices[0])
    except UnavailableError:
        plan.stop()
        raise
    except DataError:
        # Bad values are reported when the store is written.
        pass
    except BaseException:
        # Otherwise, after Ctrl-C, the process would run until all queued fetches have finished.
        plan.stop()
        raise
    seconds = time.perf_counter() - start
    measured_bytes = 0
    for key, needed in first_chunks.items():
        measured_bytes += needed.store.fetched_bytes[key[1]] - bytes_before[key]
    arrays = []
    for ((url, _), name), needed in plan.find_chunks(indices).items():
        arrays.append(ArrayEstimate(url, name, len(needed.chunks), needed.estimate_chunk_bytes()))
    return FetchEstimate(arrays, measured_bytes, seconds)


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as a string such as ``1.5 GiB``, with a unit from KiB to TiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def format_seconds(seconds: float) -> str:
    """Return a duration as a string such as ``45 min``, in seconds, minutes, hours or days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
