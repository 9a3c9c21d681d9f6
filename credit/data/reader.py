"""FieldReader: what everything else needs of the data, and `open_reader`, which finds the right one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.schema_data import DataConfig
from credit.data.sources.source_reader import open_sources
from credit.data.store.store_reader import open_configured_store
from credit.grid import LatLonGrid


class FieldReader(Protocol):
    """Fields in physical units, one time at once.

    Attributes:
        grid: rows from north to south, columns eastward.
        calendar: the calendar.
        channels: the channels; ``stored`` and ``static_stored`` are what is read.
        times: (N,) int64 minutes, increasing; there may be gaps.
        attributes: variable -> units, standard_name, long_name and, unless instantaneous, temporal.
        masks: variable with declared missing values -> (H, W) bool, True where it is always missing.
        is_thread_safe: whether several threads may read at once.
    """

    grid: LatLonGrid
    calendar: Calendar
    channels: ChannelMap
    times: np.ndarray
    attributes: dict[str, dict]
    masks: dict[str, np.ndarray]
    is_thread_safe: bool

    def read(self, index: int) -> np.ndarray:
        """Return the fields of one time, (C, H, W) float32 in the order of ``channels.stored``; NaN where masked."""
        ...

    def read_each(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the fields of several times as `read` returns them, in less time where they lie together."""
        ...

    def read_into(self, index: int, places: Sequence[np.ndarray | None]) -> None:
        """Bring the fields of one time to their places.

        Args:
            index: of the time.
            places: for each of ``channels.stored`` a contiguous array (H, W) float32, or None where it is not wanted.
        """
        ...

    def static(self) -> np.ndarray:
        """Return the static fields, (C, H, W) float32 in the order of ``channels.static_stored``."""
        ...

    def index_of(self, minutes: int) -> int | None:
        """Return the place of a time in `times`, None where it is not there."""
        ...


def open_reader(conf: DataConfig) -> FieldReader:
    """Open the training store where the config names one, else the sources.

    Raises:
        DataError: if the store is absent, incomplete or of another config, or the sources are not what the config says.
    """
    return open_sources(conf) if conf.store is None else open_configured_store(conf)
