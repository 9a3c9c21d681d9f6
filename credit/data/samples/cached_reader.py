"""KeptReader: a reader that keeps what it has read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from credit.data.store.chunk_reader import scatter_fields

if TYPE_CHECKING:
    from credit.data.reader import FieldReader


class CachedReader:
    """Another `credit.data.reader.FieldReader`, of which every time is read once (``data.cache: memory``).

    Statistics, climatology, training and validation of a run then read a time together once.

    Args:
        reader: the other; what is not about reading fields is its own.
    """

    def __init__(self, reader: FieldReader) -> None:
        self._reader = reader
        self._kept: dict[int, np.ndarray] = {}

    def read(self, index: int) -> np.ndarray:
        """Return the fields of one time, (C, H, W) float32, which are not to be written to."""
        return next(self.read_each([index]))

    def read_each(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the fields of several times; see `read`."""
        lacking = [index for index in dict.fromkeys(map(int, indices)) if index not in self._kept]
        fresh = zip(lacking, self._reader.read_each(lacking), strict=True)
        for index in map(int, indices):
            while index not in self._kept:
                number, fields = next(fresh)
                fields.flags.writeable = False
                self._kept[number] = fields
            yield self._kept[index]

    def read_into(self, index: int, places: Sequence[np.ndarray | None]) -> None:
        """Bring the fields of one time to their places; see `credit.data.reader.FieldReader`."""
        scatter_fields(self.read(index), places)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)
