"""An analytic FieldReader: fields made on the fly, so that tests need no file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from credit.channels import Channel, ChannelMap
from credit.grid import LatLonGrid
from credit.times import Clock


class AnalyticReader:
    """Fields of a function of channel and time.

    Args:
        channels: the channels.
        times: (N,) minutes.
        value: (channel, minutes, grid) -> (H, W); default: the time itself in hours.
        shape: grid points.
        calendar: CF calendar.
    """

    def __init__(
        self,
        channels: ChannelMap,
        times: np.ndarray,
        value: Callable[[Channel, int, LatLonGrid], np.ndarray] | None = None,
        shape: tuple[int, int] = (8, 16),
        calendar: str = "standard",
        masks: dict[str, np.ndarray] | None = None,
    ) -> None:
        rows, columns = shape
        step = 180 / rows
        lat = 90 - step / 2 - step * np.arange(rows)
        self.grid = LatLonGrid.from_coords(lat, np.arange(columns) * 360 / columns)[0]
        self.clock = Clock(calendar)
        self.channels = channels
        self.times = np.asarray(times, dtype=np.int64)
        self.attributes = {c.variable: {"units": "1", "standard_name": "", "long_name": ""} for c in channels.stored}
        self.masks = masks or {}
        self._value = value or (lambda channel, minutes, grid: np.full(grid.shape, minutes / 60))

    def read(self, index: int) -> np.ndarray:
        """(C, H, W) float32."""
        minutes = int(self.times[index])
        fields = [self._value(channel, minutes, self.grid) for channel in self.channels.stored]
        for number, channel in enumerate(self.channels.stored):
            if channel.variable in self.masks:
                fields[number] = np.where(self.masks[channel.variable], np.nan, fields[number])
        return np.stack(fields).astype(np.float32)

    def static(self) -> np.ndarray:
        """(C, H, W) float32."""
        return np.zeros((len(self.channels.static_stored), *self.grid.shape), dtype=np.float32)

    def index_of(self, minutes: int) -> int | None:
        """Position of a time."""
        position = int(np.searchsorted(self.times, minutes))
        return position if position < len(self.times) and self.times[position] == minutes else None


def simple_channels(**groups: list[str]) -> ChannelMap:
    """2-D channels by group."""
    return ChannelMap.build({name: {"vars_3D": [], "vars_2D": members} for name, members in groups.items()}, [])
