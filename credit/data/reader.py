"""Interface of all readers of fields, and `open_reader`, which opens the reader that the config describes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig
from credit.data.sources.source_reader import open_sources
from credit.data.store.store_reader import open_configured_store
from credit.grid import LatLonGrid


class FieldReader(Protocol):
    """Reader of fields in physical units, time by time.

    Letters of shapes: N times, C channels, H latitude rows, W longitude columns.

    Attributes:
        grid: grid of all fields, with rows from north to south and columns eastward.
        calendar: calendar of the times.
        channels: the channels of the run. The reader reads the channels in ``time_varying_stored`` and
            ``static_stored``.
        times: (N,) int64 minutes since 1900, increasing; there may be gaps.
        attributes: mapping from the name of a variable to its attributes: ``units``, ``standard_name``, ``long_name``,
            and ``temporal`` if the values are not instantaneous.
        masks: mapping from the name of each variable with declared missing values to its mask, (H, W) bool, True in
            cells that are missing at all times.
        is_thread_safe: True if several threads may read at the same time.
    """

    grid: LatLonGrid
    calendar: Calendar
    channels: ChannelMap
    times: np.ndarray
    attributes: dict[str, dict]
    masks: dict[str, np.ndarray]
    is_thread_safe: bool

    def read(self, index: int) -> np.ndarray:
        """Return the fields of one time, (C, H, W) float32, with NaN in masked cells.

        The channels are in the order of ``channels.time_varying_stored``.

        Args:
            index: index of the time in `times`.

        Raises:
            DataError: if the fields cannot be read, or values are missing in cells that are not masked.
        """
        ...

    def read_each(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield for each of several times the fields that `read` returns; faster than `read` for consecutive times.

        Args:
            indices: indices of the times in `times`.

        Raises:
            DataError: see `read`.
        """
        ...

    def read_into(self, index: int, targets: Sequence[np.ndarray | None]) -> None:
        """Read the fields of one time into the arrays `targets`.

        Args:
            index: index of the time in `times`.
            targets: for each channel of ``channels.time_varying_stored``, a contiguous array (H, W) float32, or None
                to skip the channel.

        Raises:
            DataError: see `read`.
        """
        ...

    def static(self) -> np.ndarray:
        """Return the static fields in physical units, (C, H, W) float32 in the order of ``channels.static_stored``."""
        ...

    def index_of(self, minutes: int) -> int | None:
        """Return the index in `times` of a time in minutes since 1900, None if the data do not have this time."""
        ...


def open_reader(conf: DataConfig) -> FieldReader:
    """Open the training store if the config names a store, otherwise the sources.

    Args:
        conf: the ``data`` section of the config.

    Raises:
        DataError: if the store does not exist, is incomplete or was written with a different config; or if the sources
            do not match the config.
    """
    if conf.store is None:
        return open_sources(conf)
    return open_configured_store(conf)
