"""Fields as they are scored: of the data, brought to the grid of the scores, and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from credit.channels import Channel
from credit.data.formats.regrid import Regridder
from credit.data.store.chunk_reader import scatter_fields
from credit.grid import LatLonGrid

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

_CACHE_BYTES = 1 << 30
Masks = Mapping[str, np.ndarray]


class RegriddedReader:
    """A FieldReader on the grid of the scores that keeps what it has read, up to a limit of memory.

    Climatology, damping and scoring read the same times; in a small data set each is read once. Without a grid of their
    own the scores have the data's, and nothing is regridded.

    Args:
        reader: of the data.
        least_fields: times to keep at least.
        onto: the grid of the scores, None for the data's.
    """

    def __init__(self, reader: FieldReader, least_fields: int, onto: LatLonGrid | None = None) -> None:
        self.calendar, self.channels, self.times = reader.calendar, reader.channels, reader.times
        self.attributes, self.index_of, self.static = reader.attributes, reader.index_of, reader.static
        self.path = getattr(reader, "path", None)  # of the store, which may have a climatology
        self.grid, self.masks = reader.grid, reader.masks
        self._native_grid, self._native_masks = reader.grid, reader.masks
        read = reader.read
        if onto is not None:
            self.grid, self.masks = onto, _regrid_masks(reader.masks, Regridder(reader.grid, onto, "conservative"))
            bring = self.bring(reader.channels.stored, reader.grid)

            def read(index: int) -> np.ndarray:
                return bring(reader.read(index))

        field_bytes = 4 * len(reader.channels.stored) * self.grid.shape[0] * self.grid.shape[1]
        self.read = lru_cache(maxsize=max(least_fields, _CACHE_BYTES // field_bytes))(read)

    def read_each(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the fields of several times."""
        return map(self.read, indices)

    def read_into(self, index: int, places: Sequence[np.ndarray | None]) -> None:
        """Bring the fields of one time to their places; see `credit.data.reader.FieldReader`."""
        scatter_fields(self.read(index), places)

    def bring(self, channels: Sequence[Channel], grid: LatLonGrid) -> Callable[[np.ndarray], np.ndarray]:
        """Return what brings fields (..., C, h, w) of `channels` on `grid` to the grid of the scores.

        What the data have masked is missing there, too, on the data's grid; on another, what the fields have as NaN.
        """
        if self.grid.describe_mismatch(grid) is None:
            return lambda fields: fields
        regridder, hidden = Regridder(grid, self.grid, "conservative"), None
        if self._native_masks and self._native_grid.describe_mismatch(grid) is None:
            nothing = np.zeros(grid.shape, dtype=bool)
            hidden = np.stack([self._native_masks.get(channel.variable, nothing) for channel in channels])

        def apply(fields: np.ndarray) -> np.ndarray:
            return regridder.apply(fields if hidden is None else np.where(hidden, np.float32(np.nan), fields))

        return apply


def _regrid_masks(masks: Masks, regridder: Regridder) -> dict[str, np.ndarray]:
    """Return variable -> True where less than half of a cell is there."""
    return {
        name: np.isnan(regridder.apply(np.where(mask, np.float32(np.nan), np.float32(0.0))))
        for name, mask in masks.items()
    }
