"""`credit check` reports the cost of long chunks in source files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from credit.cli.check import disk
from credit.cli.check.report import CheckReport
from credit.config.sections.data import PreprocessConfig
from credit.data.sources.source_reader import SourceReader


@pytest.mark.parametrize(
    ("store", "memory", "times_per_chunk", "expected"),
    [
        (None, 1.0, 31, "sources: chunks of files span up to 31 times, and training unpacks a whole chunk for each"),
        ("a.zarr", 1.0, 31, "credit preprocess reads 12 at once and unpacks each about 3 times; "
         "preprocess.memory_gib=2.4, in each of 2 processes"),
        ("a.zarr", 2.4, 31, None),
        (None, 1.0, 1, None),
    ],
)  # fmt: skip
def test_chunks_of_many_times_are_reported(
    store: str | None, memory: float, times_per_chunk: int, expected: str | None
) -> None:
    notes: list[str] = []
    reader = SourceReader.__new__(SourceReader)
    reader.times_per_chunk, reader.bytes_per_time = times_per_chunk, 4 * 721 * 1440 * 20
    config = SimpleNamespace(
        data=SimpleNamespace(store=store), preprocess=PreprocessConfig(memory_gib=memory, workers=2)
    )
    data = SimpleNamespace(
        reader=reader, grid=SimpleNamespace(shape=(721, 1440)), channels=SimpleNamespace(stored=20 * [None])
    )
    disk._report_long_chunks(config, data, CheckReport(notes.append))
    assert [expected is not None and expected in line for line in notes] == [True] * (expected is not None)
