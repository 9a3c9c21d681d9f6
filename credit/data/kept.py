"""KeptReader: a reader that keeps what it has read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from credit.data.chunks import copy_fields

if TYPE_CHECKING:
    from credit.data.reader import FieldReader


class KeptReader:
    """Another `credit.data.reader.FieldReader`, of which every time is read once (``data.cache: memory``).

    Statistics, climatology, training and validation of a run then read a time together once.

    Args:
        reader: the other; what is not about reading fields is its own.
    """

    def __init__(self, reader: FieldReader) -> None:
        self._reader = reader
        self._kept = lru_cache(maxsize=None)(self._read)

    def read(self, index: int) -> np.ndarray:
        """Return the fields of one time, (C, H, W) float32, which are not to be written to."""
        return self._kept(int(index))

    def read_into(self, index: int, places: Sequence[np.ndarray | None]) -> None:
        """Bring the fields of one time to their places; see `credit.data.reader.FieldReader`."""
        copy_fields(self.read(index), places)

    def _read(self, index: int) -> np.ndarray:
        fields = self._reader.read(index)
        fields.flags.writeable = False
        return fields

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)
