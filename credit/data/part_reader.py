"""Reader of a part of the grid, for ranks that divide the fields among them.

Shape suffixes: C channels, H latitude rows, W longitude columns, h and w rows and columns of the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from credit.data.reader import FieldReader
from credit.data.store.store_reader import StoreReader


class GridPartReader:
    """Reader that returns some rows and columns of the fields of a wrapped reader.

    From a training store, only the blocks that overlap the part are read (``preprocess.blocks``). From any other
    reader, complete fields are read, and the part is cut out.

    Args:
        reader: wrapped reader of the complete grid.
        rows: consecutive latitude rows to return, with a start and a stop.
        columns: consecutive longitude columns to return, with a start and a stop.

    Attributes:
        grid: the part of the grid; it does not cover the globe.
    """

    def __init__(self, reader: FieldReader, rows: slice, columns: slice) -> None:
        self._reader = reader
        self._part = (rows, columns)
        self._index = (..., rows, columns)
        self._reads_parts = isinstance(reader, StoreReader)
        self._shape = reader.grid.shape
        self.grid = reader.grid.select(rows, columns)
        self.masks = {name: mask_HW[rows, columns] for name, mask_HW in reader.masks.items()}
        self.calendar = reader.calendar
        self.channels = reader.channels
        self.times = reader.times
        self.attributes = reader.attributes
        self.is_thread_safe = reader.is_thread_safe

    def read(self, index: int) -> np.ndarray:
        """Return the part of the fields of one time, (C, h, w) float32; see `FieldReader.read`."""
        if self._reads_parts:
            fields_Chw = np.empty((len(self.channels.time_varying_stored), *self.grid.shape), dtype=np.float32)
            self.read_into(index, fields_Chw)
            return fields_Chw
        return self._select(self._reader.read(index))

    def read_each(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the part of the fields of several times; see `FieldReader.read_each`."""
        if self._reads_parts:
            yield from map(self.read, indices)
            return
        # Other readers may read adjacent times at once.
        for fields_CHW in self._reader.read_each(indices):
            yield self._select(fields_CHW)

    def read_into(self, index: int, targets: Sequence[np.ndarray | None]) -> None:
        """Read the part of the fields of one time into the arrays `targets` (h, w); see `FieldReader.read_into`."""
        if self._reads_parts:
            self._reader.read_into(index, targets, self._part)
            return
        # Channels without a target are not read.
        fields = [None if target is None else np.empty(self._shape, dtype=np.float32) for target in targets]
        self._reader.read_into(index, fields)
        for target_hw, field_HW in zip(targets, fields, strict=True):
            if target_hw is not None:
                target_hw[...] = field_HW[self._index]

    def static(self) -> np.ndarray:
        """Return the part of the static fields, (C, h, w) float32; see `FieldReader.static`."""
        return self._select(self._reader.static())

    def index_of(self, minutes: int) -> int | None:
        """Return the index in `times` of a time in minutes since 1900, None if the data do not have this time."""
        return self._reader.index_of(minutes)

    def _select(self, fields_CHW: np.ndarray) -> np.ndarray:
        """Return the rows and columns of the part from complete fields, (..., h, w), as a contiguous copy."""
        return np.ascontiguousarray(fields_CHW[self._index])
