"""Reader that caches the fields of a field reader in memory (``data.cache: memory``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from credit.data.store.chunk_reader import scatter_fields

if TYPE_CHECKING:
    from credit.data.reader import FieldReader


class CachedReader:
    """Wrapper of a `credit.data.reader.FieldReader` with a cache, which reads the fields of each time only once.

    Statistics, climatology, training and validation of a run share the fields in memory.

    Args:
        reader: reader whose fields are cached. It also provides all attributes that this class does not define.
    """

    def __init__(self, reader: FieldReader) -> None:
        self._reader = reader
        self._cache: dict[int, np.ndarray] = {}

    @property
    def uncached(self) -> FieldReader:
        """Underlying reader without the cache."""
        return self._reader

    def read(self, index: int) -> np.ndarray:
        """Return the fields of one time, (C, H, W) float32, read-only; see `credit.data.reader.FieldReader.read`."""
        if index not in self._cache:
            self._cache[index] = _make_read_only(self._reader.read(index))
        return self._cache[index]

    def read_each(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the fields of several times, in the order of `indices`, as `read` returns them."""
        indices = [int(index) for index in indices]
        missing_indices = [index for index in dict.fromkeys(indices) if index not in self._cache]
        # Read all missing times in one call, because a reader may read neighbouring times at once.
        missing_fields = zip(missing_indices, self._reader.read_each(missing_indices), strict=True)
        # Missing fields are returned in the order of first use. The inner loop skips times that a different caller has
        # cached in the meantime.
        for index in indices:
            while index not in self._cache:
                missing_index, fields_CHW = next(missing_fields)
                self._cache[missing_index] = _make_read_only(fields_CHW)
            yield self._cache[index]

    def read_into(self, index: int, targets: Sequence[np.ndarray | None]) -> None:
        """Copy the fields of one time to target arrays; see `credit.data.reader.FieldReader.read_into`."""
        scatter_fields(self.read(index), targets)

    # Python calls this method only for attributes that this class does not define.
    def __getattr__(self, name: str) -> Any:
        # Unpickling reads attributes before `_reader` exists.
        if name == "_reader":
            raise AttributeError(name)
        return getattr(self._reader, name)


def _make_read_only(fields_CHW: np.ndarray) -> np.ndarray:
    """Make an array read-only, because several callers share it, and return the same array."""
    fields_CHW.flags.writeable = False
    return fields_CHW
